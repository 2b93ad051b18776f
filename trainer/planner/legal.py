"""Which candidates a job allows at all; arithmetic, no torch.

In: a Job and a Candidate. Out: every reason why it cannot be, each with its numbers. The rules are
the trainer's (`trainer/layout.py`, `trainer/limits/`), and Megatron's where both have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.planner.candidate import Candidate, Job


def reasons(job: Job, one: Candidate) -> list[str]:
    """All of them; none for a legal candidate."""
    found = []
    if one.world != job.cluster.count:
        found.append(
            f"dp x tp x pp x cp = {one.dp} x {one.tp} x {one.pp} x {one.cp} = {one.world}, and "
            f"there are {job.cluster.count} GPUs"
        )
    piece = one.dp * one.microbatch
    if job.global_batch % piece:
        found.append(
            f"global batch {job.global_batch} is not a multiple of dp x microbatch = {one.dp} x "
            f"{one.microbatch}"
        )
    return found + _tensor(job, one) + _stages(job, one) + _sequence(job, one) + _shared(job, one)


def _tensor(job: Job, one: Candidate) -> list[str]:
    shape, found = job.shape, []
    if one.tp == 1:
        return ["sp=true shards the sequence over tp, and tp is 1"] if one.sp else []
    if not shape.latent and one.tp > shape.kv_heads:
        found.append(f"tp={one.tp} exceeds the {shape.kv_heads} key and value heads")
    sizes = [("heads", shape.heads), ("mlp", shape.mlp)]
    if not shape.latent and one.tp <= shape.kv_heads:
        sizes.append(("kv_heads", shape.kv_heads))
    if shape.experts:
        sizes.append(("expert mlp", shape.expert_mlp))
    found += [f"tp={one.tp} does not divide {name}={size}" for name, size in sizes if size % one.tp]
    if one.tp > job.cluster.per_node:
        found.append(
            f"tp={one.tp} leaves the {job.cluster.per_node} GPUs of a node: its all-reduces in "
            f"every layer would cross the network"
        )
    return found


def _stages(job: Job, one: Candidate) -> list[str]:
    found = []
    layers, stages = job.shape.layers, one.pp * one.virtual
    if stages > layers:
        found.append(f"pp x virtual = {one.pp} x {one.virtual} stages exceed {layers} layers")
    if (one.schedule == "interleaved") != (one.virtual > 1):
        found.append(f"virtual={one.virtual} and schedule={one.schedule}: only interleaved has it")
    if one.schedule == "interleaved":
        if one.pp == 1:
            found.append("an interleaved schedule needs several stages, and pp is 1")
        elif one.microbatches(job) % one.pp:
            found.append(
                f"an interleaved schedule takes microbatches in groups of pp={one.pp}, and "
                f"{one.microbatches(job)} are no multiple"
            )
    return found


def _sequence(job: Job, one: Candidate) -> list[str]:
    found = []
    if one.cp > 1 and job.sequence % (2 * one.cp):
        found.append(f"sequence {job.sequence} does not divide into 2 x cp = {2 * one.cp} pieces")
    if one.sp and job.sequence // one.cp % one.tp:
        found.append(f"sequence / cp = {job.sequence // one.cp} does not divide by tp={one.tp}")
    return found


def _shared(job: Job, one: Candidate) -> list[str]:
    found = []
    if one.zero and one.data == 1:
        found.append(f"zero={one.zero} shares over dp x cp, and that is one rank")
    if one.ep == 1:
        return found
    if not job.shape.experts:
        return [*found, f"ep={one.ep} shares experts, and the model has none"]
    if job.shape.experts % one.ep:
        found.append(f"ep={one.ep} does not divide {job.shape.experts} experts")
    if one.data % one.ep:
        found.append(f"ep={one.ep} does not divide dp x cp = {one.dp} x {one.cp}")
    return found
