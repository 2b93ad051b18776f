"""Tensor parallelism: which module is split how, as a table, and the few functions that do it.

In: a model (on any device, meta included) and the tp axis. Out: the same model with every listed
module holding its shard, and for every sharded parameter the dim it is split along.
The model file is never asked to know: rules act on modules by path (Shoeybi et al. 2019,
arXiv:1909.08053: f = copy forward, sum backward; g = sum forward, copy backward).

    x ──f──► [query|key|value] ─► attention over own heads ─► [out] ──g──► + residual
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

from trainer.model import IGNORE, NextByteLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.mesh import Axis

    Rule = Callable[[nn.Module, Axis], dict[str, int]]
    """Changes a module in place; returns the sharded dim of each parameter that it split."""


class _CopyIn(torch.autograd.Function):
    """f: every rank uses the same value, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.axis.all_reduce(total)
        return total, None


class _SumOut(torch.autograd.Function):
    """g: each rank holds a part of the sum, and the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:  # noqa: ARG004 (torch passes ctx)
        total = x.clone(memory_format=torch.contiguous_format)
        axis.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits split along the vocabulary; no rank ever holds them whole."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
        """(n, vocabulary / tp) and (n,) to a scalar in nats."""
        top = logits.detach().amax(dim=-1)
        axis.all_reduce(top, dist.ReduceOp.MAX)
        shifted = logits.detach() - top[:, None]
        exponents = shifted.exp()
        valid = targets != IGNORE
        local, mine = _own_ids(targets, logits.shape[-1], axis)
        at_target = shifted.gather(-1, local[:, None]).squeeze(-1) * mine
        sums = torch.stack((exponents.sum(dim=-1), at_target))
        axis.all_reduce(sums)
        ctx.save_for_backward(exponents.div_(sums[0][:, None]), local, mine, valid)
        return ((sums[0].log() - sums[1]) * valid).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        share, local, mine, valid = ctx.saved_tensors
        slope = share.scatter_add(-1, local[:, None], -mine[:, None].to(share.dtype))
        return slope * (valid[:, None] * grad), None, None


class VocabularyParallelEmbedding(nn.Embedding):
    """Rows of the table are split; an id is looked up where its row is and added to zeros."""

    axis: Axis

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, sequence) to (batch, sequence, width), the same on every tp rank."""
        local, mine = _own_ids(ids, self.weight.shape[0], self.axis)
        rows = F.embedding(local, self.weight) * mine[..., None].to(self.weight.dtype)
        out: Tensor = _SumOut.apply(rows, self.axis)
        return out


class VocabularyParallelLoss(NextByteLoss):
    """NextByteLoss for logits whose vocabulary is split over tp."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As NextByteLoss, with (batch, sequence, vocabulary / tp) logits."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        out: Tensor = _VocabularyCrossEntropy.apply(
            wide.flatten(0, 1), targets.flatten(), self.axis
        )
        return out


def column(module: nn.Module, axis: Axis) -> dict[str, int]:
    """Split a linear layer's outputs: each rank computes some of them."""
    _shrink(module, "weight", 0, axis)
    return {"weight": 0}


def row(module: nn.Module, axis: Axis) -> dict[str, int]:
    """Split a linear layer's inputs: each rank computes a part of every output, then g."""
    _shrink(module, "weight", 1, axis)
    module.register_forward_hook(lambda _module, _args, out: _SumOut.apply(out, axis))
    return {"weight": 1}


def entry(module: nn.Module, axis: Axis) -> dict[str, int]:
    """f at the door of a module whose first layers are column-parallel: one sum for all of them."""
    module.register_forward_pre_hook(
        lambda _module, args: (_CopyIn.apply(args[0], axis), *args[1:])
    )
    return {}


def vocabulary(module: nn.Module, axis: Axis) -> dict[str, int]:
    """Split an embedding's rows."""
    _shrink(module, "weight", 0, axis)
    module.__class__ = VocabularyParallelEmbedding
    module.axis = axis  # type: ignore[assignment]  # torch types attributes as tensors or modules
    return {"weight": 0}


PLAN: tuple[tuple[str, Rule], ...] = (
    ("embed", vocabulary),
    ("layers.*.attention", entry),
    ("layers.*.attention.query", column),
    ("layers.*.attention.key", column),
    ("layers.*.attention.value", column),
    ("layers.*.attention.out", row),
    ("layers.*.mlp", entry),
    ("layers.*.mlp.gate", column),
    ("layers.*.mlp.up", column),
    ("layers.*.mlp.down", row),
    ("head", entry),
    ("head", column),
)
"""Path pattern to rule. What is not named is replicated, and its gradient is whole on every rank,
since every value that it touches is."""


def parallelize(model: nn.Module, axis: Axis) -> dict[str, int]:
    """Apply PLAN to the parts that `model` has; the sharded dim of each parameter, by path."""
    sharded: dict[str, int] = {}
    if axis.size == 1:
        return sharded
    for path, module in model.named_modules():
        for pattern, rule in PLAN:
            if fnmatchcase(path, pattern) and path.count(".") == pattern.count("."):
                dims = rule(module, axis)
                sharded.update({f"{path}.{name}": dim for name, dim in dims.items()})
    return sharded


def loss(axis: Axis) -> NextByteLoss:
    """The loss that fits the head as PLAN leaves it."""
    return NextByteLoss() if axis.size == 1 else VocabularyParallelLoss(axis)


def shard(full: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's part of a whole parameter."""
    return full.chunk(axis.size, dim=dim)[axis.index]


def _own_ids(ids: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Each id as a row of this rank's part (0 where it has none), and whether it has one."""
    local = ids - axis.index * rows
    mine = (local >= 0) & (local < rows)
    return local * mine, mine


def _shrink(module: nn.Module, name: str, dim: int, axis: Axis) -> None:
    """Replace a parameter by one of its shard's shape; values come when it is materialised."""
    whole = getattr(module, name)
    setattr(module, name, nn.Parameter(shard(whole.detach(), dim, axis).clone()))
