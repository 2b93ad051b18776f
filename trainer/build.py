"""From a config and a mesh to a model on its device: every wrapper, in one fixed and visible order.

In: Config, Mesh, device. Out: `Built`. The whole model exists only on the meta device, without
memory; each rank then makes its own shards, each from the whole parameter's name and the seed, so
that the start is the same under every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer import faults
from trainer.layout import microbatches
from trainer.model import Transformer, initial_value
from trainer.parallel import pipeline, schedule, tensor
from trainer.parallel.ddp import GradientBuckets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from trainer.config import Config
    from trainer.layout import Layout
    from trainer.mesh import Mesh

_WEIGHTS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.float32,  # products alone are bfloat16; an update of 1e-3 would round away
}


@dataclass(frozen=True)
class Built:
    """A model ready to train on this rank."""

    parameters: Mapping[str, nn.Parameter]
    """This rank's parameters or shards, by the path that they have in the whole model."""
    dims: Mapping[str, int]
    """The dim along which tp splits a parameter, for those that it splits."""
    sharded: Mapping[str, frozenset[str]]
    """The axes over which a parameter is split, for those that are."""
    buckets: GradientBuckets
    pipeline: pipeline.Pipeline
    fault: faults.Fault
    whole: int
    """Elements of all parameters of the whole model."""


def build(config: Config, layout: Layout, mesh: Mesh, device: torch.device) -> Built:
    """Cut the model into stages, split it over tp, fill it, and lay its gradients into buckets."""
    with torch.device("meta"):
        model = Transformer(config.model)
    shapes = {path: p.shape for path, p in model.named_parameters()}
    pipeline.keep_stage(model, mesh["pp"])
    dims = tensor.parallelize(model, mesh["tp"])
    model.to(_WEIGHTS[config.train.dtype]).to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for path, p in parameters.items():
            value = initial_value(path, shapes[path], config.model.layers, config.train.seed)
            p.copy_(tensor.shard(value, dims[path], mesh["tp"]) if path in dims else value)
    count = microbatches(config, layout)
    fault = faults.make(config.faults, mesh.rank, device)
    actions = schedule.one_forward_one_backward(layout.pp, count)[mesh["pp"].index]
    return Built(
        parameters=parameters,
        dims=dims,
        sharded=dict.fromkeys(dims, frozenset({"tp"})),
        buckets=GradientBuckets(
            list(parameters.values()),
            mesh["dp"],
            bucket_bytes=config.parallel.bucket,
            passes=count,
        ),
        pipeline=pipeline.Pipeline(
            model,
            tensor.loss(mesh["tp"]),
            mesh["pp"],
            actions,
            autocast=torch.bfloat16 if config.train.dtype == "bfloat16" else None,
            fault=fault,
        ),
        fault=fault,
        whole=sum(shape.numel() for shape in shapes.values()),
    )
