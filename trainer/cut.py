"""The model as the ranks of a stage share its layers, before it has memory.

In: Config, Layout, Mesh. Out: `Cut`: the whole chain, its modules split over tp, cp and ep by
table, and `occupy`, which gives some of its parts their memory on this rank: each shard comes from
the whole parameter's name and the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer import blueprint
from trainer.config import ConfigError
from trainer.parallel import context, expert, plan, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from trainer.config import Config
    from trainer.layout import Layout
    from trainer.mesh import Mesh
    from trainer.model import NextTokenLoss

WEIGHTS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.float32,  # products alone are bfloat16; an update of 1e-3 would round away
    "float16": torch.float32,
}
PRODUCTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""What autocast computes matrix products in; the other dtypes have no autocast."""


@dataclass(frozen=True)
class Cut:
    """The model as the ranks of a stage share its layers, before it has memory."""

    whole: blueprint.Blueprint
    chain: Mapping[str, nn.Module]
    shapes: Mapping[str, torch.Size]
    """Of whole parameters."""
    dims: Mapping[str, int]
    alone: frozenset[str]
    """Parameters that ep splits."""
    loss: NextTokenLoss

    def occupy(
        self, own: Sequence[tuple[str, nn.Module]], config: Config, mesh: Mesh, device: torch.device
    ) -> dict[str, nn.Parameter]:
        """Give these parts their memory and their start values; their parameters by path."""
        for _, module in own:
            module.to(WEIGHTS[config.train.dtype])
            module.to(device) if self.whole.start is None else module.to_empty(device=device)
        first: dict[nn.Parameter, str] = {}
        for path, p in (pair for one in own for pair in named_parameters(*one)):
            first.setdefault(p, path)  # of two that share a parameter the first one names it
        parameters = {path: p for p, path in first.items()}
        if self.whole.start is not None:
            with torch.no_grad():
                for path, p in parameters.items():
                    value = self.whole.start(path, self.shapes[path])
                    dim = self.dims.get(path)
                    p.copy_(value if dim is None else tensor.shard(value, dim, mesh["tp"]))
        return parameters


def whole_cut(config: Config, layout: Layout, mesh: Mesh) -> Cut:
    """The model that the config asks for. ConfigError where it cannot be cut so."""
    whole = blueprint.draw(config)
    if wrong := blueprint.problems(whole, config, layout):
        raise ConfigError(wrong)
    shapes = {path: p.shape for path, p in whole.model.named_parameters()}
    split_by = plan.rules(whole.model, whole.plan)
    alone = expert.parallelize(whole.model, mesh)
    dims = plan.parallelize(whole.model, whole.plan, mesh["tp"], sequence=config.parallel.sp)
    context.parallelize(whole.model, mesh["cp"], config.parallel.cp_form)
    loss = tensor.loss(mesh["tp"], split="head" in split_by.values())
    return Cut(whole, dict(whole.chain), shapes, dims, alone, loss)


def named_parameters(path: str, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a part of the chain, by their paths in the whole model."""
    for name, p in part.named_parameters():
        yield (f"{path}.{name}" if path else name), p
