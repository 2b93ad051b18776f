"""How long a step takes: roofline for what computes, alpha-beta for what travels. No torch.

In: a Job and a legal Candidate. Out: Timing, with what is exposed of each axis. Between perfect
overlap at the best rate of products and none at the worst lie the error bars.

    layer      FLOPs / (efficiency x peak) + bytes touched / bandwidth of memory
    collective calls x alpha + bytes sent / (share of link x bandwidth of link)
    step       microbatches x slowest stage / (1 - bubble) + what nothing hides + optimizer
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.planner.bubble import bubble
from trainer.planner.communication import AXES, traffic
from trainer.planner.memory import held, layer_activations, own_layers

if TYPE_CHECKING:
    from trainer.planner.candidate import Candidate, Job
    from trainer.planner.communication import Traffic


@dataclass(frozen=True)
class Rates:
    """What of the data sheet's rates is reached; rules of thumb, which bound the error bars."""

    products: float
    """Share of the peak that matrix products reach. Fitted to what torchtitan published for Llama 3
    on H100 (`tests/trainer/test_planner_published.py`): a fit, no independent confirmation."""
    overlap: float
    """Share of the computing beside which communication may hide, and does."""
    tensor: float = 0.0
    """Share of tp's collectives that hides behind products (asynchronous tp)."""
    attention: float = 0.6
    """Rate of FlashAttention over that of products (arXiv:2307.08691, arXiv:2407.08608)."""
    memory: float = 0.8
    """Share of the memory's bandwidth."""
    link: float = 0.8
    """Share of a link's bandwidth, large messages (nccl-tests)."""
    inside: float = 8e-6
    """Seconds a call inside a node."""
    across: float = 25e-6
    """Seconds a call between nodes, and as much of it again for each doubling of nodes as / 5."""


LIKELY = Rates(products=0.55, overlap=0.8)
BEST = Rates(products=0.75, overlap=1.0, tensor=0.7, attention=0.8)
WORST = Rates(products=0.4, overlap=0.0, attention=0.4)
_FP8 = 0.75
"""fp8 products reach less of their peak: quantisation is work too."""


@dataclass(frozen=True)
class Timing:
    """Of one step, seconds."""

    step: float
    compute: float
    """Of the slowest stage's rank."""
    bubble: float
    """Share of the pipeline's time."""
    exposed: dict[str, float]
    """Seconds of each axis that nothing hides."""
    optimizer: float


def of_step(job: Job, one: Candidate, rates: Rates = LIKELY) -> Timing:
    """The step of the slowest stage."""
    count = one.microbatches(job)
    idle = bubble(one.schedule, one.pp, count, one.virtual)
    ranks = sorted({0, one.pp // 2, one.pp - 1})
    stages = [_stage(job, one, rank, rates) for rank in ranks]
    slow = max(stages, key=lambda stage: stage.busy + stage.late)
    exposed = slow.exposed
    if one.pp > 1:  # filling and draining passes every boundary twice
        hop = slow.hop * 2 * (one.pp * one.virtual - 1)
        exposed["pp"] += hop + slow.hop * 2 * (count - 1) * one.virtual * (1 - rates.overlap)
    step = slow.busy / (1 - idle) + slow.late + exposed["pp"] + slow.optimizer
    return Timing(step, slow.compute, idle, exposed, slow.optimizer)


@dataclass(frozen=True)
class _Stage:
    busy: float
    """A step's microbatches, with what is exposed of their communication."""
    late: float
    """Once a step, beside the pipeline."""
    compute: float
    exposed: dict[str, float]
    hop: float
    """One send to the next stage."""
    optimizer: float


def _stage(job: Job, one: Candidate, rank: int, rates: Rates) -> _Stage:
    count = one.microbatches(job)
    forward, backward = _compute(job, one, rank, rates)
    compute = count * (forward + backward)
    exposed = dict.fromkeys(AXES, 0.0)
    busy, late, hop = compute, 0.0, 0.0
    ahead = dict.fromkeys(AXES, 0.0)
    for entry in traffic(job, one, rank):
        seconds = _seconds(job, one, entry, rates)
        if entry.axis == "pp":
            hop = max(hop, seconds / entry.calls)
        elif entry.when == "ahead":
            ahead[entry.axis] += seconds
        elif entry.when == "step":  # beside the backward of the last microbatch
            left = max(seconds * (1 - rates.overlap), seconds - rates.overlap * backward)
            exposed[entry.axis] += left
            late += left
        elif entry.when == "end":
            left = seconds * (1 - rates.overlap / 2)
            exposed[entry.axis] += left
            late += left
        else:
            left = seconds * (1 - rates.tensor if entry.axis == "tp" else 1)
            exposed[entry.axis] += left
            busy += left
    hides = {"cp": _attention(job, one, rank, rates) * count, "dp": compute}
    for axis, seconds in ahead.items():
        beside = hides.get(axis, 0.0) * rates.overlap
        left = max(seconds - beside, seconds * (1 - rates.overlap) / 2)
        exposed[axis] += left
        busy += left
    return _Stage(busy, late, compute, exposed, hop, _optimizer(job, one, rank, rates))


def _compute(job: Job, one: Candidate, rank: int, rates: Rates) -> tuple[float, float]:
    """(forward, backward) of one microbatch over a rank's stages."""
    layers = own_layers(job, one, rank)
    spots = one.microbatch * job.sequence / one.cp
    forward = backward = 0.0
    with_experts = job.shape.expert_layers(layers)
    for experts, number in ((True, with_experts), (False, len(layers) - with_experts)):
        if number:
            products, attention, rest = _layer(job, one, rates, experts=experts)
            once = products + attention + rest
            again = {"none": 0.0, "selective": once - products, "full": once}[one.checkpointing]
            forward += number * once
            backward += number * (2 * once + attention / 2 + again)
    if rank == one.pp - 1:
        shape = job.shape
        head = 2 * shape.output * spots / one.tp / _rate(job, rates, fp8=False)
        head += 3 * spots * shape.vocabulary / one.tp * 4 / _bandwidth(job, rates)
        forward, backward = forward + head, backward + 2 * head
    return forward, backward


@lru_cache(maxsize=65536)
def _layer(job: Job, one: Candidate, rates: Rates, *, experts: bool) -> tuple[float, ...]:
    """Seconds forward of (matrix products, attention, what is bound by memory).

    Backward takes twice as long, of attention 2.5 times: FlashAttention computes scores again.
    """
    shape = job.shape
    spots = one.microbatch * job.sequence / one.cp
    at = shape.layers - 1 if experts else 0
    products = 2 * shape.products(at) * spots / one.tp / _rate(job, rates, fp8=True)
    rate = _rate(job, rates, fp8=False) * rates.attention
    attention = shape.scores(job.sequence) * spots / one.tp / rate
    touched = 2 * layer_activations(job, one, experts=experts)[0]
    return products, attention, touched / _bandwidth(job, rates)


def _attention(job: Job, one: Candidate, rank: int, rates: Rates) -> float:
    """Seconds of attention of one microbatch, forward and backward, which a ring hides behind."""
    spots = one.microbatch * job.sequence / one.cp
    rate = _rate(job, rates, fp8=False) * rates.attention
    each = job.shape.scores(job.sequence) * spots / one.tp / rate
    return 3.5 * each * len(own_layers(job, one, rank))


def _rate(job: Job, rates: Rates, *, fp8: bool) -> float:
    gpu = job.cluster.gpu
    if job.numbers.compute >= 4:
        return gpu.float32_peak * rates.products
    if fp8 and job.numbers.name == "fp8" and gpu.fp8_peak > gpu.peak:
        return gpu.fp8_peak * rates.products * _FP8
    return gpu.peak * rates.products


def _bandwidth(job: Job, rates: Rates) -> float:
    return job.cluster.gpu.bandwidth * rates.memory


def _optimizer(job: Job, one: Candidate, rank: int, rates: Rates) -> float:
    """Every state is read, and all but gradients written."""
    own, numbers = held(job, one, rank), job.numbers
    share = one.data if one.zero else 1
    touched = numbers.gradient + 2 * (numbers.optimizer + numbers.parameter)
    mine = own.dense / share + own.expert / max(1, share // one.ep if one.zero else 1)
    return mine * touched / _bandwidth(job, rates)


def link(job: Job, one: Candidate, axis: str, size: int) -> tuple[float, float, int]:
    """(bytes a second of a rank, seconds a call, members in a node) of a group of this axis.

    Ranks lie as mesh.order = pp, dp, cp, tp: tp's are neighbours, then cp's, then dp's. A group
    with k members in each node uses k adapters at once, since rings enter and leave by each.
    """
    strides = {"tp": 1, "cp": one.tp, "ep": one.tp, "dp": one.tp, "pp": one.world // one.pp}
    cluster = job.cluster
    near = min(size, max(1, cluster.per_node // strides[axis]))
    if near == size and strides[axis] * (size - 1) < cluster.per_node:
        return cluster.inside, LIKELY.inside, near
    hops = math.log2(max(2, size / near))
    return (
        min(cluster.inside, near * cluster.across),
        LIKELY.across * (1 + hops / 5),
        near,
    )


def _seconds(job: Job, one: Candidate, entry: Traffic, rates: Rates) -> float:
    bandwidth, alpha, near = link(job, one, entry.axis, entry.size)
    if entry.op == "all_to_all" and near < entry.size:  # every pair talks: no ring to ride on
        bandwidth = job.cluster.across * (entry.size - 1) / (entry.size - near)
    elif entry.op == "send" and near < entry.size:
        bandwidth = job.cluster.across
    return entry.calls * alpha + entry.sent / (bandwidth * rates.link)


def mfu(job: Job, step: float) -> float:
    """Model FLOPs of a step over what the GPUs could have done in bf16 (float32: in that)."""
    gpu = job.cluster.gpu
    peak = gpu.float32_peak if job.numbers.compute >= 4 else gpu.peak
    return job.shape.flops(job.sequence) * job.tokens / (step * job.cluster.count * peak)
