"""What a rank sends in a step, by axis and by reason; arithmetic, no torch.

In: a Job, a legal Candidate and a pipeline rank. Out: Traffic, one entry for each kind of
collective, with the bytes of its whole tensor and how often it runs. `sent` is what one rank then
sends if collectives are rings, as the docstrings of `trainer/parallel/` count it:

    all-reduce 2 (n - 1) / n    all-gather, reduce-scatter, all-to-all (n - 1) / n    send 1

Scalars (the gradient norm, counts of tokens) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planner.memory import held, own_layers

if TYPE_CHECKING:
    from trainer.planner.candidate import Candidate, Job

AXES = ("dp", "tp", "pp", "cp", "ep")
_FACTORS = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
}


@dataclass(frozen=True)
class Traffic:
    """One kind of call."""

    axis: str
    op: str
    what: str
    size: int
    """Ranks of the group."""
    payload: float
    """Bytes of the whole tensor; of a send what is sent."""
    calls: float
    """A step."""
    when: str
    """forward, backward, ahead (beside what computes, a microbatch), step (once, beside the last
    backward) or end (once, nothing beside it)."""

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in a step."""
        factor = _FACTORS.get(self.op)
        each = (
            self.payload if factor is None else factor * (self.size - 1) / self.size * self.payload
        )
        return each * self.calls


def traffic(job: Job, one: Candidate, rank: int) -> list[Traffic]:
    """All of one pipeline rank."""
    layers = own_layers(job, one, rank)
    return [
        *_tensor(job, one, rank, len(layers)),
        *_context(job, one, len(layers)),
        *_expert(job, one, job.shape.expert_layers(layers)),
        *_pipeline(job, one, rank),
        *_data(job, one, rank),
    ]


def sent_by_axis(job: Job, one: Candidate) -> dict[str, float]:
    """Bytes that a rank sends in a step over each axis; of the stage that sends most there."""
    most = dict.fromkeys(AXES, 0.0)
    for rank in sorted({0, one.pp // 2, one.pp - 1}):
        sums = dict.fromkeys(AXES, 0.0)
        for entry in traffic(job, one, rank):
            sums[entry.axis] += entry.sent
        most = {axis: max(most[axis], sums[axis]) for axis in AXES}
    return most


def _spots(job: Job, one: Candidate) -> float:
    return one.microbatch * job.sequence / one.cp


def _tensor(job: Job, one: Candidate, rank: int, layers: int) -> list[Traffic]:
    """Two doors in and two out of each layer (arXiv:1909.08053; arXiv:2205.05198 for sp)."""
    if one.tp == 1:
        return []
    n, count, numbers = one.tp, one.microbatches(job), job.numbers
    spots, h = _spots(job, one), job.shape.width
    inward, outward = spots * h * numbers.stream, spots * h * numbers.compute
    into = out_of = 2 * layers * count
    if one.checkpointing == "full" or (one.checkpointing == "selective" and not numbers.regather):
        into *= (
            2  # torch ends a recomputation at the last value that it needs, before the last door
        )
        out_of += out_of if numbers.regather else out_of // 2
    back = 2 * layers * count
    first, last = int(rank == 0) * count, int(rank == one.pp - 1) * count
    out: list[Traffic] = []

    def add(op: str, what: str, payload: float, calls: float, when: str) -> None:
        out.append(Traffic("tp", op, what, n, payload, calls, when))

    if one.sp:
        add("all_gather", "inputs", inward, into + last, "forward")
        add("reduce_scatter", "outputs", outward, out_of, "forward")
        add("reduce_scatter", "embedding", inward, first, "forward")
        add("reduce_scatter", "gradients of inputs", inward, back + last, "backward")
        add("all_gather", "gradients of outputs", outward, back, "backward")
        add("all_gather", "gradients of the embedding", inward, first, "backward")
        if numbers.regather:
            add("all_gather", "inputs again", inward, back + last, "backward")
        norms = (2 * layers + (rank == one.pp - 1)) * job.shape.norm * h * numbers.gradient
        add("all_reduce", "gradients of norms", norms, 1, "end")
    else:
        add("all_reduce", "outputs", outward, out_of, "forward")
        add("all_reduce", "embedding", inward, first, "forward")
        add("all_reduce", "gradients of inputs", inward, back + last, "backward")
    add("all_reduce", "loss", spots * max(4, numbers.compute), 3 * last, "forward")
    return [entry for entry in out if entry.calls]


def _context(job: Job, one: Candidate, layers: int) -> list[Traffic]:
    """As `trainer/parallel/context.py` says it."""
    if one.cp == 1:
        return []
    n, calls = one.cp, layers * one.microbatches(job)
    elements = _spots(job, one) * job.shape.key_value_width / one.tp
    own, wide = elements * job.numbers.compute, elements * max(4, job.numbers.compute)
    forwards = 2 if one.checkpointing != "none" else 1
    if one.cp_form == "all-gather":
        return [
            Traffic("cp", "all_gather", "keys and values", n, n * own, calls * forwards, "forward"),
            Traffic("cp", "reduce_scatter", "their gradients", n, n * own, calls, "backward"),
        ]
    turns = calls * (n - 1)
    return [
        Traffic("cp", "send", "keys and values", n, own, turns * (forwards + 1), "ahead"),
        Traffic("cp", "send", "their gradients", n, wide, calls * n, "ahead"),
    ]


def _expert(job: Job, one: Candidate, layers: int) -> list[Traffic]:
    """As `trainer/parallel/expert.py` says it, with even load and none dropped."""
    if one.ep == 1 or not layers:
        return []
    n, calls = one.ep, layers * one.microbatches(job)
    rows = _spots(job, one) * job.shape.top_k
    forwards = 2 if one.checkpointing != "none" else 1
    size = rows * job.shape.width * job.numbers.compute
    counts = 8.0 * job.shape.experts
    return [
        Traffic("ep", "all_to_all", "rows out and home", n, size, 2 * calls * forwards, "forward"),
        Traffic("ep", "all_to_all", "their gradients", n, size, 2 * calls, "backward"),
        Traffic("ep", "send", "counts of rows", n, counts, calls * forwards, "forward"),
    ]


def _pipeline(job: Job, one: Candidate, rank: int) -> list[Traffic]:
    """The residual stream to the next stage, its gradient to the one before."""
    if one.pp == 1:
        return []
    outside = one.tp if one.sp else 1
    size = _spots(job, one) * job.shape.width * job.numbers.stream / outside
    count = one.microbatches(job)
    on = count * (one.virtual - (rank == one.pp - 1))
    back = count * (one.virtual - (rank == 0))
    entries = [
        Traffic("pp", "send", "outputs", one.pp, size, on, "forward"),
        Traffic("pp", "send", "their gradients", one.pp, size, back, "backward"),
    ]
    return [entry for entry in entries if entry.calls]


def _data(job: Job, one: Candidate, rank: int) -> list[Traffic]:
    """Gradients, and what ZeRO shares (arXiv:1910.02054, section 7); over dp x cp."""
    own = held(job, one, rank)
    out: list[Traffic] = []
    groups = (("dense", own.dense, one.data), ("experts", own.expert, one.data // one.ep))
    units = max(1, len(own_layers(job, one, rank)))
    for name, parameters, n in groups:
        if n > 1 and parameters:
            out += _shared(job, one, name, parameters / units, n, units)
    return out


def _shared(
    job: Job, one: Candidate, name: str, parameters: float, n: int, units: int
) -> list[Traffic]:
    """Of `units` layers with so many parameters each: one call a layer."""
    numbers, count = job.numbers, one.microbatches(job)
    gradients, told = parameters * numbers.wire, f"gradients, {name}"
    if not one.zero:
        return [Traffic("dp", "all_reduce", told, n, gradients, units, "step")]
    if one.zero == 3:
        whole, calls = parameters * numbers.gathered, count * units
        return [
            Traffic("dp", "all_gather", f"parameters, {name}", n, whole, 2 * calls, "ahead"),
            Traffic("dp", "reduce_scatter", told, n, gradients, calls, "ahead"),
        ]
    times, when = (1, "step") if one.zero == 1 else (count, "ahead")
    whole = parameters * numbers.parameter
    return [
        Traffic("dp", "reduce_scatter", told, n, gradients, times * units, when),
        Traffic("dp", "all_gather", f"parameters, {name}", n, whole, units, "end"),
    ]
