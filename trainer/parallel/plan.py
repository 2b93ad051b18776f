"""The plan: which module is split over tp by which rule, as a table from path to rule.

In: a model, a plan and the tp axis. Out: the model changed in place, and the dim along which each
sharded parameter is split. A plan is data: patterns of module paths (`*` is one name) to words.

    entry       f in front of a module whose first layers are column-parallel
    column      a linear layer whose outputs are split; what follows works on a share of them
    row         a linear layer whose inputs are split so; g behind it
    inner       a linear layer whose inputs are split so; its output is left a part of a sum
    leave       g behind a module whose output is such a part
    vocabulary  an embedding whose rows are split
    head        entry and column, for the layer whose outputs are the logits: they stay split, and
                the loss knows

What is not named is replicated, and its gradient is whole on every rank, since every value that it
touches is; on sequence shards it is a part, which PartialSums sums. So is a router's, always: it
stands between f and g, and what it weighs there are parts.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trainer.parallel import tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from trainer.mesh import Axis

    Plan = Mapping[str, str]
    Rule = Callable[[nn.Module, tensor.Doors], dict[str, int]]
    """Changes a module in place; returns the sharded dim of each parameter that it split."""

TRANSFORMER: Plan = {
    "embed": "vocabulary",
    "layers.*.attention": "entry",
    "layers.*.attention.query": "column",
    "layers.*.attention.key": "column",
    "layers.*.attention.value": "column",
    "layers.*.attention.out": "row",
    "layers.*.mlp": "entry",
    "layers.*.mlp.gate": "column",
    "layers.*.mlp.up": "column",
    "layers.*.mlp.down": "row",
    "layers.*.mlp.experts": "leave",
    "layers.*.mlp.experts.*.gate": "column",
    "layers.*.mlp.experts.*.up": "column",
    "layers.*.mlp.experts.*.down": "inner",
    "head": "head",
}
"""Of trainer.model.Transformer."""


def _head(module: nn.Module, doors: tensor.Doors) -> dict[str, int]:
    return tensor.entry(module, doors) | tensor.column(module, doors)


RULES: Mapping[str, Rule] = {
    "entry": tensor.entry,
    "column": tensor.column,
    "row": tensor.row,
    "inner": tensor.inner,
    "leave": tensor.leave,
    "vocabulary": tensor.vocabulary,
    "head": _head,
}


def rules(model: nn.Module, plan: Plan) -> dict[str, str]:
    """The rule of each module that the plan names, by path."""
    return {
        path: rule
        for path, _ in model.named_modules()
        for pattern, rule in plan.items()
        if path.count(".") == pattern.count(".") and fnmatchcase(path, pattern)
    }


def parallelize(
    model: nn.Module, plan: Plan, axis: Axis, *, sequence: bool = False
) -> dict[str, int]:
    """Apply `plan` to `model`; the sharded dim of each parameter, by path."""
    if axis.size == 1:
        return {}
    doors = tensor.Doors(axis, sequence)
    sharded: dict[str, int] = {}
    for path, rule in rules(model, plan).items():
        dims = RULES[rule](model.get_submodule(path), doors)
        sharded.update({f"{path}.{name}": dim for name, dim in dims.items()})
    return sharded
