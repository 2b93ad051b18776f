"""What a rank of each stage holds at its fullest, by category; arithmetic, no torch.

In: a Job and a legal Candidate. Out: bytes by category for every stage. A stage's peak is the sum:
states live always, activations of the microbatches in flight at the fullest moment, logits at the
turn from forward to backward of the last stage.

    parameter gradient optimizer   by ZeRO stage (arXiv:1910.02054, section 5)
    activation                     per layer and microbatch (arXiv:2205.05198, section 4), in flight
    logits communication overhead  what the formulas of papers leave out
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.planner.bubble import in_flight

if TYPE_CHECKING:
    from trainer.planner.candidate import Candidate, Job, Numbers
    from trainer.planner.shape import Shape

CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer",
    "activation",
    "logits",
    "communication",
    "overhead",
)
CONTEXT = 1 << 30
"""CUDA context, libraries' work space (cuBLAS, cuDNN): a rule of thumb, no formula."""
COMMUNICATOR = 128 << 20
"""NCCL's buffers of one communicator: channels x 2 peers x 4 MiB (NCCL_BUFFSIZE), rule of thumb."""
FRAGMENTS = 0.03
"""Share of all else that the allocator loses in gaps: rule of thumb."""
_BUCKET = 25 << 20
_OUTSTANDING = 2
"""Buckets of gradients, and units of parameters, that are under way at once."""


@dataclass(frozen=True)
class Held:
    """Parameters of one rank of a stage before replicas share them."""

    dense: float
    expert: float
    largest: float
    """Of one layer, which ZeRO-3 gathers whole."""


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Layers of a stage, as `trainer.split.even` cuts them."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def own_layers(job: Job, one: Candidate, rank: int) -> tuple[int, ...]:
    """All layers of a pipeline rank, of all its virtual stages."""
    return _layers_of(job.shape.layers, one.pp, one.virtual, rank)


@lru_cache(maxsize=65536)
def _layers_of(layers: int, pp: int, virtual: int, rank: int) -> tuple[int, ...]:
    return tuple(
        at for turn in range(virtual) for at in stage_layers(layers, pp * virtual, turn * pp + rank)
    )


@lru_cache(maxsize=65536)
def _held(shape: Shape, tp: int, ep: int, spans: tuple[tuple[int, int], ...], ends: str) -> Held:
    dense = expert = largest = 0.0
    for begin, stop in spans:
        for at, count in _kinds(shape, begin, stop):
            layer = shape.layer(at)
            own = layer.sharded / tp + layer.replicated
            others = layer.expert / (tp * ep)
            dense, expert = dense + count * own, expert + count * others
            largest = max(largest, own + others)
    if "first" in ends:
        own = shape.vocabulary * shape.width / tp + shape.positions * shape.width
        dense, largest = dense + own, max(largest, own)
    if "last" in ends:
        own = shape.output / tp
        dense += shape.last_norm
        if not (shape.tied and "first" in ends):  # both ends of a pipeline hold a tied matrix
            dense, largest = dense + own, max(largest, own)
    return Held(dense, expert, largest)


def _kinds(shape: Shape, begin: int, stop: int) -> list[tuple[int, int]]:
    """(a layer, how many are like it) of begin..stop: layers differ only in having experts."""
    if not shape.experts:
        return [(begin, stop - begin)] if stop > begin else []
    cut = min(max(shape.dense_layers, begin), stop)
    parts = ((begin, cut), (cut, stop))
    return [(start, end - start) for start, end in parts if end > start]


def held(job: Job, one: Candidate, rank: int) -> Held:
    """What a pipeline rank's stages consist of."""
    stages = one.pp * one.virtual
    spans = tuple(
        (own.start, own.stop)
        for own in (
            stage_layers(job.shape.layers, stages, turn * one.pp + rank)
            for turn in range(one.virtual)
        )
    )
    ends = ("first" if rank == 0 else "") + ("last" if rank == one.pp - 1 else "")
    return _held(job.shape, one.tp, one.ep, spans, ends)


def states(numbers: Numbers, zero: int, parameters: float, sharers: int) -> tuple[float, ...]:
    """Bytes of parameters, gradients and optimizer states of a rank.

    ZeRO-1 shares optimizer states over `sharers`, 2 also gradients, 3 also parameters.
    """
    sizes = (numbers.parameter, numbers.gradient, numbers.optimizer)
    shared_from = (3, 2, 1)
    return tuple(
        parameters * size / (sharers if zero >= least else 1)
        for size, least in zip(sizes, shared_from, strict=True)
    )


@lru_cache(maxsize=65536)
def layer_activations(job: Job, one: Candidate, *, experts: bool) -> tuple[float, float, float]:
    """Bytes that a layer keeps of a microbatch: (all, products alone, input alone).

    Per position, in elements: inputs and outputs of both norms 4 h; query, keys, values and the
    output of attention; gate, up, activated and product of the MLP (plain: 2). For GPT in 16 bits
    with dropout that is s b h 34, and 5 a s / h more without FlashAttention (arXiv:2205.05198,
    eq. 1, 2, 4). What passes inside tp counts 1 / tp, the rest too with sequence parallelism.
    """
    shape, numbers = job.shape, job.numbers
    spots = one.microbatch * job.sequence / one.cp
    c, h = numbers.compute, shape.width
    outside = 1 / one.tp if one.sp else 1.0
    entering = outside if numbers.regather else 1.0
    stream, normed = 2 * h * numbers.stream * outside, 2 * h * c * entering
    masks = 2.0 * h * outside if shape.dropout else 0.0
    heads = (shape.query_width + shape.key_value_width) * c / one.tp
    mixed = shape.value_width * c / one.tp
    lse = shape.heads * 4 / one.tp
    square = 0.0
    if not job.flash:
        per_head = 2 * c + (1 if shape.dropout else 0)
        square, lse = per_head * shape.heads * job.sequence / one.tp, 0.0
    low = shape.latent
    latent = 2 * (low.query_rank + low.key_rank + low.rotary) * c * entering if low else 0.0
    inner, passed = _mlp(shape, experts=experts)
    hidden = (4 if shape.matrices == 3 else 2) * inner * c / one.tp
    products = (2 if shape.matrices == 3 else 1) * inner * c / one.tp
    moved = 2.0 * passed * h * c if experts else 0.0
    scores = 3.0 * shape.experts * 4 if experts else 0.0
    whole = stream + normed + masks + heads + mixed + lse + square + latent + hidden
    some = h * numbers.stream * outside + heads + products + 2 * h * c * outside
    least = h * numbers.stream * outside
    return spots * (whole + moved + scores), spots * (some + moved / 2), spots * least


def _mlp(shape: Shape, *, experts: bool) -> tuple[float, float]:
    """(hidden elements a position, rows of experts a position): even load over ranks."""
    if not experts:
        return float(shape.mlp), 0.0
    return float(shape.top_k * shape.expert_mlp + shape.shared_mlp), float(shape.top_k)


def _activations(job: Job, one: Candidate, rank: int) -> float:
    """Of all microbatches in flight, and of the one layer that is computed again."""
    shape = job.shape
    which = CHECKPOINTING[one.checkpointing]
    layers = own_layers(job, one, rank)
    with_experts = shape.expert_layers(layers)
    flight = in_flight(one.schedule, one.pp, one.microbatches(job), one.virtual)[rank]
    share = flight / one.virtual
    kept = again = 0.0
    for experts, number in ((True, with_experts), (False, len(layers) - with_experts)):
        if number:
            sizes = layer_activations(job, one, experts=experts)
            kept += number * sizes[which] * share
            again = max(again, sizes[0] - sizes[which])
    ends = one.microbatch * job.sequence / one.cp * shape.width
    outside = 1 / one.tp if one.sp else 1.0
    if rank == one.pp - 1:  # what the last norm and the head keep
        numbers = job.numbers
        kept += ends * (numbers.stream * outside + numbers.compute)
    if rank == 0 and shape.dropout:
        kept += ends * outside * flight
    return kept + again


CHECKPOINTING = {"none": 0, "selective": 1, "full": 2}
"""Which of `layer_activations` stays."""


def _logits(job: Job, one: Candidate) -> float:
    """As products give them, in float32 for the loss, and their gradient."""
    spots = one.microbatch * job.sequence / one.cp * job.shape.vocabulary / one.tp
    c = job.numbers.compute
    return spots * (c + (4 if c < 4 else 0) + max(4, c))


def _buffers(job: Job, one: Candidate, own: Held) -> float:
    """What travels: buckets of ZeRO-1 and 2, units of ZeRO-3, keys and values, stages' inputs."""
    numbers, c = job.numbers, job.numbers.compute
    spots = one.microbatch * job.sequence / one.cp
    size = 0.0
    if one.zero == 3:
        size += _OUTSTANDING * own.largest * (numbers.gathered + numbers.wire)
    elif one.zero:
        size += _OUTSTANDING * max(_BUCKET, own.largest * numbers.wire)
    elif numbers.wire != numbers.gradient:
        size += _BUCKET
    if one.cp > 1:
        turns = one.cp if one.cp_form == "all-gather" else 2
        size += turns * spots * job.shape.key_value_width / one.tp * c
    if one.pp > 1:
        outside = 1 / one.tp if one.sp else 1.0
        size += 2 * spots * job.shape.width * numbers.stream * outside * one.virtual
    return size


def of_stage(job: Job, one: Candidate, rank: int) -> dict[str, float]:
    """Bytes by category of a rank in pipeline rank `rank`."""
    own = held(job, one, rank)
    dense = states(job.numbers, one.zero, own.dense, one.data)
    expert = states(job.numbers, one.zero, own.expert, max(1, one.data // one.ep))
    sums = [a + b for a, b in zip(dense, expert, strict=True)]
    out = dict(zip(CATEGORIES[:3], sums, strict=True))
    out["activation"] = _activations(job, one, rank)
    out["logits"] = _logits(job, one) if rank == one.pp - 1 else 0.0
    out["communication"] = _buffers(job, one, own)
    axes = sum(size > 1 for size in (one.data, one.tp, one.pp, one.cp, one.ep))
    out["overhead"] = CONTEXT + COMMUNICATOR * (1 + axes) + FRAGMENTS * sum(out.values())
    return out


def by_stage(job: Job, one: Candidate) -> list[dict[str, float]]:
    """Of every pipeline rank."""
    return [of_stage(job, one, rank) for rank in range(one.pp)]


def peak(job: Job, one: Candidate) -> tuple[float, int]:
    """(bytes of the fullest rank, its stage).

    Looks only at the ranks that can be it: both ends, and those with more layers than the ranks
    before them, since what a schedule keeps in flight never grows along the pipeline.
    """
    most, ranks = -1, []
    for rank in range(one.pp):
        layers = len(own_layers(job, one, rank))
        if layers > most or rank == one.pp - 1 or job.shape.experts:
            ranks.append(rank)
        most = max(most, layers)
    sums = [(sum(of_stage(job, one, rank).values()), rank) for rank in ranks]
    return max(sums, key=lambda pair: (pair[0], -pair[1]))
