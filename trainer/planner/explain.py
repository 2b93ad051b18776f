"""Every number of a plan with its formula, the values in it, and where the formula comes from.

In: a Job and a fitting Candidate. Out: entries, in the order in which one depends on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planner import memory, timing
from trainer.planner.bubble import in_flight
from trainer.planner.communication import traffic

if TYPE_CHECKING:
    from trainer.planner.candidate import Candidate, Job

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Formula:
    """One."""

    name: str
    value: str
    formula: str
    source: str


def explain(job: Job, one: Candidate) -> list[Formula]:
    """Of the fullest stage, and of the step."""
    _, rank = memory.peak(job, one)
    return [
        *_states(job, one, rank),
        *_kept(job, one, rank),
        *_sent(job, one, rank),
        *_time(job, one),
    ]


def _states(job: Job, one: Candidate, rank: int) -> list[Formula]:
    own, numbers = memory.held(job, one, rank), job.numbers
    parts = memory.of_stage(job, one, rank)
    held = own.dense + own.expert
    shares = {"parameter": 3, "gradient": 2, "optimizer": 1}
    sizes = {
        "parameter": numbers.parameter,
        "gradient": numbers.gradient,
        "optimizer": numbers.optimizer,
    }
    out = [
        Formula(
            "parameters of a rank",
            f"{held / 1e9:.3f} B",
            f"{job.shape.parameters / 1e9:.2f} B of the model / (tp={one.tp} x pp={one.pp}, "
            f"experts also / ep={one.ep}), stage {rank}; norms and routers whole on each tp rank",
            "arXiv:1909.08053, section 3",
        )
    ]
    for name, least in shares.items():
        over = f" / (dp x cp = {one.data})" if one.zero >= least else ""
        out.append(
            Formula(
                name,
                f"{parts[name] / _GIB:.2f} GiB",
                f"{held / 1e9:.3f} B x {sizes[name]} bytes{over}"
                + (f", experts / {max(1, one.data // one.ep)}" if over and own.expert else ""),
                f"ZeRO, arXiv:1910.02054, section 3.1: {numbers.states} bytes a parameter "
                f"({numbers.name}), shared from stage {least}",
            )
        )
    return out


def _kept(job: Job, one: Candidate, rank: int) -> list[Formula]:
    parts = memory.of_stage(job, one, rank)
    count = one.microbatches(job)
    flight = in_flight(one.schedule, one.pp, count, one.virtual)[rank]
    layers = memory.own_layers(job, one, rank)
    sizes = memory.layer_activations(job, one, experts=job.shape.has_experts(layers[-1]))
    layer = sizes[memory.CHECKPOINTING[one.checkpointing]]
    return [
        Formula(
            "activation",
            f"{parts['activation'] / _GIB:.2f} GiB",
            f"{len(layers)} layers x {flight} microbatches in flight"
            + (f" / virtual={one.virtual}" if one.virtual > 1 else "")
            + f" x {layer / _MIB:.0f} MiB a layer (recompute {one.checkpointing}; all: "
            f"{sizes[0] / _MIB:.0f}), and the layer that is computed again",
            "arXiv:2205.05198, eq. 1, 2, 4, with keys, values and gate as the model has them; in "
            f"flight: {one.schedule}, arXiv:2104.04473",
        ),
        Formula(
            "logits",
            f"{parts['logits'] / _GIB:.2f} GiB",
            f"{one.microbatch} x {job.sequence} / cp={one.cp} x {job.shape.vocabulary} / "
            f"tp={one.tp} x (product, float32 copy, gradient); last stage only",
            "arXiv:2205.05198, section 4.3",
        ),
        Formula(
            "communication",
            f"{parts['communication'] / _GIB:.2f} GiB",
            "two buckets or two gathered units of ZeRO, cp's keys and values, stages' inputs",
            "trainer/parallel/zero.py, context.py, pipeline.py",
        ),
        Formula(
            "overhead",
            f"{parts['overhead'] / _GIB:.2f} GiB",
            f"{memory.CONTEXT / _GIB:.0f} GiB + {memory.COMMUNICATOR >> 20} MiB a communicator + "
            f"{memory.FRAGMENTS:.0%} of the rest",
            "rule of thumb",
        ),
    ]


def _sent(job: Job, one: Candidate, rank: int) -> list[Formula]:
    out = []
    for entry in traffic(job, one, rank):
        bandwidth, alpha, _ = timing.link(job, one, entry.axis, entry.size)
        out.append(
            Formula(
                f"{entry.axis}: {entry.what}",
                f"{entry.sent / 1e9:.3f} GB a step",
                f"{entry.calls:.0f} {entry.op} of {entry.payload / 1e6:.2f} MB over {entry.size} "
                f"ranks; {bandwidth / 1e9:.0f} GB/s, {alpha * 1e6:.0f} us a call",
                "ring: all-reduce 2 (n - 1) / n, gather, scatter and all-to-all (n - 1) / n",
            )
        )
    return out


def _time(job: Job, one: Candidate) -> list[Formula]:
    timed = timing.of_step(job, one)
    likely = timing.LIKELY
    return [
        Formula(
            "bubble",
            f"{timed.bubble:.1%}",
            f"{one.schedule}: p={one.pp}, m={one.microbatches(job)}, v={one.virtual}; "
            "(p - 1) / (v m + p - 1), zero-bubble (p - 1) / (3 m + p - 1)",
            "arXiv:2104.04473, section 2.2; arXiv:2401.10241",
        ),
        Formula(
            "step time",
            f"{timed.step:.3f} s",
            f"compute {timed.compute:.3f} s at {likely.products:.0%} of the peak / (1 - bubble) + "
            f"exposed {sum(timed.exposed.values()):.3f} s + optimizer {timed.optimizer:.3f} s",
            f"roofline and alpha-beta; peak and links: {job.cluster.gpu.source}",
        ),
        Formula(
            "MFU",
            f"{timing.mfu(job, timed.step):.1%}",
            f"{job.shape.flops(job.sequence) / 1e9:.2f} GFLOP a token (6 x products + causal "
            f"attention) x {job.tokens} tokens / (step x {job.cluster.count} x peak)",
            "arXiv:2204.02311, appendix B, with half of attention's square",
        ),
    ]
