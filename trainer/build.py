"""From a config and a mesh to a model on its device: every wrapper, in one fixed and visible order.

In: Config, Mesh, device. Out: `Built`. The whole model exists only on the meta device, without
memory; each rank then makes its own shards, each from the whole parameter's name and the seed, so
that the start is the same under every layout. (A user's model starts as its own file says, whole,
on every rank alike.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer import blueprint, dropout, faults, stages
from trainer.cut import PRODUCTS, WEIGHTS, named_parameters, whole_cut
from trainer.layout import microbatches
from trainer.mesh import one_rank
from trainer.parallel import expert, pipeline, schedule, tensor, timeline
from trainer.parallel.ddp import GradientBuckets, pack
from trainer.parallel.recompute import keep
from trainer.parallel.replicas import Replicas
from trainer.parallel.unit import Group, Sharing
from trainer.parallel.zero import ShardedReplicas
from trainer.place import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config import Config, TrainConfig
    from trainer.layout import Layout
    from trainer.mesh import Axis, Mesh
    from trainer.mlp import Router
    from trainer.parallel.actions import Action

    _Own = tuple[pipeline.Part, list[tuple[str, nn.Parameter]]]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Built:
    """A model ready to train on this rank."""

    parameters: Mapping[str, nn.Parameter]
    """This rank's parameters or shards, by the path that they have in the whole model."""
    dims: Mapping[str, int]
    """The dim along which tp splits a parameter, for those that it splits."""
    pieces: Mapping[str, nn.Parameter]
    """What this rank updates: its parameters, or under ZeRO its share of each."""
    places: Mapping[str, Place]
    """Where each piece lies in the whole parameter."""
    shards: Mapping[str, Place]
    """Where each of `parameters` lies in the whole parameter."""
    sharded: Mapping[str, frozenset[str]]
    """The axes over which pieces are split, for those that are."""
    buckets: Replicas
    partial: tensor.PartialSums
    pipeline: pipeline.Pipeline
    schedules: list[list[Action]]
    """Of every pp rank."""
    layers: list[range]
    """Of every stage."""
    costs: timeline.Costs
    """What the schedule's actions are expected to cost: the stages' layers, or measured times."""
    passing: dropout.Passing
    fault: faults.Fault
    routers: Sequence[Router]
    """Of all layers that have experts; other ranks' stages never use theirs here."""
    shapes: Mapping[str, torch.Size]
    """Of this rank's parameters in the whole model, in the order of forward."""
    whole: int
    """Elements of all parameters of the whole model."""


def build(config: Config, layout: Layout, mesh: Mesh, device: torch.device) -> Built:
    """Cut the model into stages, split it over tp, fill it, and lay its gradients into buckets."""
    cut = whole_cut(config, layout, mesh)
    count = microbatches(config, layout)
    fault = faults.make(config.faults, mesh.rank, device, mesh)
    schedules = schedule.make(config.parallel.schedule, layout.pp, count, config.parallel.virtual)
    layers, costs = stages.decide(config, layout, list(cut.chain), schedules, mesh, device)
    faults.check(config.faults, mesh, cut.chain, layers)
    held = pipeline.own_stages(list(cut.chain), mesh["pp"], layers)
    own = [(path, cut.chain[path]) for paths in held.values() for path in paths]
    parameters = cut.occupy(own, config, mesh, device)
    passing = dropout.passing(config, layout, mesh, device)
    dropout.install(cut.whole.model, config.model.dropout, passing)
    parts = {
        stage: [
            pipeline.Part(
                path,
                cut.chain[path],
                keep=keep(path, config.memory.checkpoint, stage),
                mixes=blueprint.takes_documents(cut.chain[path]),
            )
            for path in paths
        ]
        for stage, paths in held.items()
    }
    routers = expert.routers(cut.whole.model)
    for router in routers:
        router.share = 1 / (config.train.global_batch * layout.tp)  # each tp rank adds a part
        router.load = None  # a measured split has run layers already
    weighing = {router.weight for router in routers}
    buckets = _replicas(config, parts, mesh, count, cut.alone)
    pieces = buckets.pieces or parameters
    shards = {path: _place(cut.shapes[path], cut.dims.get(path), mesh["tp"]) for path in parameters}
    shared = frozenset({"shard"} if config.parallel.zero else ())
    return Built(
        parameters=parameters,
        dims=cut.dims,
        pieces=pieces,
        places={
            path: shards[path].stretch(buckets.starts.get(path, 0), piece.numel())
            for path, piece in pieces.items()
        },
        shards=shards,
        sharded={
            path: shared
            | ({"tp"} if path in cut.dims else set())
            | ({"ep"} if path in cut.alone else set())
            for path in pieces
        },
        buckets=buckets,
        partial=tensor.PartialSums(
            [
                p
                for path, p in pieces.items()
                if path not in cut.dims and (config.parallel.sp or parameters[path] in weighing)
            ],
            mesh["tp"],
            device,
        ),
        pipeline=pipeline.Pipeline(
            parts,
            cut.loss,
            mesh["pp"],
            schedules[mesh["pp"].index],
            schedule.forwards(schedules)[mesh["pp"].index],
            width=cut.whole.width,
            dtype=WEIGHTS[config.train.dtype],
            autocast=PRODUCTS.get(config.train.dtype),
            fault=fault,
            passing=passing,
            backward_ended=buckets.backward_ended,
            shards=layout.tp if config.parallel.sp else 1,
        ),
        schedules=schedules,
        layers=layers,
        costs=costs,
        passing=passing,
        fault=fault,
        routers=routers,
        shapes={path: cut.shapes[path] for path in parameters},
        whole=sum(shape.numel() for shape in cut.shapes.values()),
    )


def _place(shape: torch.Size, dim: int | None, axis: Axis) -> Place:
    """Where this rank's shard of a parameter lies."""
    whole = Place.of_all(tuple(shape))
    return whole if dim is None else whole.cut(dim, axis.index, axis.size)


def reduce_dtype(train: TrainConfig) -> torch.dtype:
    """In which gradients travel over the data axis; auto: as the weights, so that no sum rounds."""
    name = train.reduce_dtype
    return WEIGHTS[train.dtype] if name == "auto" else _DTYPES[name]


def _replicas(
    config: Config,
    stages: Mapping[int, list[pipeline.Part]],
    mesh: Mesh,
    passes: int,
    experts: frozenset[str],
) -> Replicas:
    """How replicas of this rank's parameters keep in step: DDP, or a form of ZeRO.

    An update on the host is one of shares, though of the whole where nothing is shared: stage 1 on
    groups of one rank, with all ranks that hold the same parameters as its replicas.
    """
    kinds = [(mesh.data, (mesh.shard, mesh.replica), False)]
    if experts:
        kinds.append((mesh.expert_data, (mesh.expert_shard, mesh.expert_replica), True))
    return Replicas(
        [
            _set(config, mesh, data, axes, passes, _named(stages, experts, of_experts))
            for data, axes, of_experts in kinds
        ]
    )


def _named(
    stages: Mapping[int, list[pipeline.Part]], experts: frozenset[str], of_experts: bool
) -> list[list[_Own]]:
    """By stage, its parts with those parameters that are experts, or that are not."""
    return [
        [
            (
                part,
                [
                    (path, p)
                    for path, p in named_parameters(part.path, part.module)
                    if (path in experts) == of_experts
                ],
            )
            for part in stage
        ]
        for stage in stages.values()
    ]


def _set(
    config: Config,
    mesh: Mesh,
    data: Axis,
    axes: tuple[Axis, Axis],
    passes: int,
    stages: list[list[_Own]],
) -> GradientBuckets | ShardedReplicas:
    """Parameters whose replicas are the ranks of `data`, which ZeRO divides into `axes`."""
    zero, size, wire = config.parallel.zero, config.parallel.bucket, reduce_dtype(config.train)
    if zero:
        return _shared(config, stages, axes, passes)
    if config.memory.offload != "none":
        return _shared(config, stages, (one_rank("dp", mesh.rank), data), passes)
    flat = list(dict.fromkeys(p for stage in stages for _, own in stage for _, p in own))
    return GradientBuckets(flat, data, bucket_bytes=size, passes=passes, wire=wire)


def _shared(
    config: Config,
    stages: list[list[_Own]],
    axes: tuple[Axis, Axis],
    passes: int,
) -> ShardedReplicas:
    """ZeRO over `axes` (shard and replica): a unit for each part in stage 3, else for each bucket.

    A bucket never spans stages, whose backwards come apart.
    """
    zero = max(1, config.parallel.zero)
    sharing = Sharing(
        zero, reduce_dtype(config.train), config.memory.offload, config.parallel.prefetch
    )
    if zero == 3:
        parts = [(part, own) for stage in stages for part, own in stage if own]
        half = PRODUCTS.get(config.train.dtype)
        units = [(part, Group(own, *axes, dtype)) for part, named in parts
                 for own, dtype in _by_dtype(part.module, named, half)]  # fmt: skip
        shared = ShardedReplicas([group for _, group in units], sharing, passes=passes)
        for (part, _), unit in zip(units, shared.buckets, strict=True):
            shared.wrap(part.module, unit)
        return shared
    groups = []
    for stage in stages:
        path_of = {p: path for _, named in reversed(stage) for path, p in named}
        own = list(dict.fromkeys(p for _, named in stage for _, p in named))
        groups += [
            Group([(path_of[p], p) for p in one], *axes)
            for one in pack(own[::-1], config.parallel.bucket)
        ]
    return ShardedReplicas(groups, sharing, passes=passes)


def _by_dtype(
    part: nn.Module, named: list[tuple[str, nn.Parameter]], half: torch.dtype | None
) -> list[tuple[list[tuple[str, nn.Parameter]], torch.dtype | None]]:
    """What only enters matrix products is gathered in autocast's dtype, all else in the weights'.

    It moves half the bytes. And autograd keeps the weights of products for backward: of a copy that
    autocast makes, it would keep the memory that stage 3 means to free.
    """
    if half is None:
        return [(named, None)]
    products = {p for one in part.modules() if isinstance(one, nn.Linear) for p in one.parameters()}
    split = (
        ([(path, p) for path, p in named if p in products], half),
        ([(path, p) for path, p in named if p not in products], None),
    )
    return [(own, dtype) for own, dtype in split if own]
