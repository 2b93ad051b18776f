"""Tensor parallelism: the rules by which `plan.py` splits modules over tp, and the loss behind.

In: a module (on any device, meta included) and its doors to the tp axis. Out: the same module
holding its shard, and for every sharded parameter the dim it is split along.
The model file is never asked to know: rules act on modules by path (Shoeybi et al. 2019,
arXiv:1909.08053: f = copy forward, sum backward; g = sum forward, copy backward).

    x ──f──► [query|key|value] ─► attention over own heads ─► [out] ──g──► + residual

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) what lies between g and f, the
norms and the residual stream, holds a shard of the sequence: g scatters it, f gathers it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

from trainer.model import IGNORE, NextTokenLoss

if TYPE_CHECKING:
    from trainer.mesh import Axis


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


class _GatherIn(torch.autograd.Function):
    """f with sequence shards: gather them forward; each rank's gradient is its part of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather_sequence(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_sequence(grad, ctx.axis), None


class _ScatterOut(torch.autograd.Function):
    """g with sequence shards: sum the ranks' parts and keep the own shard of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return scatter_sequence(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(grad, ctx.axis), None


@dataclass(frozen=True)
class Doors:
    """f and g: how values enter what is split over tp, and leave it."""

    axis: Axis
    sequence: bool
    """Whether outside of them each rank holds a shard of the sequence."""
    shards: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """What became of each parameter that was split: one that two modules share stays shared."""

    def enter(self, x: Tensor) -> Tensor:
        """f."""
        out: Tensor = (_GatherIn if self.sequence else _CopyIn).apply(x, self.axis)
        return out

    def leave(self, x: Tensor) -> Tensor:
        """g."""
        out: Tensor = (_ScatterOut if self.sequence else _SumOut).apply(x, self.axis)
        return out


class PartialSums:
    """Gradients of what is used on sequence shards: each rank has the part of its positions."""

    def __init__(self, pieces: list[nn.Parameter], axis: Axis, device: torch.device) -> None:
        self.pieces = pieces
        self.axis = axis
        self.device = device
        """Where collectives run; the pieces may be in host memory."""

    def finish(self) -> None:
        """Sum them over tp, all in one; call once a step, after the sum over replicas."""
        gradients = [p.grad for p in self.pieces if p.grad is not None]
        if not gradients or self.axis.group is None:
            return
        total = torch.cat([one.flatten() for one in gradients]).to(self.device)
        self.axis.all_reduce(total)
        at = 0
        for one in gradients:
            one.copy_(total[at : at + one.numel()].view_as(one))
            at += one.numel()


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

    doors: Doors

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, sequence) to (batch, sequence or its shard, width)."""
        local, mine = _own_ids(ids, self.weight.shape[0], self.doors.axis)
        rows = F.embedding(local, self.weight) * mine[..., None].to(self.weight.dtype)
        return self.doors.leave(rows)


class RowParallelLinear(nn.Linear):
    """Inputs are split; the bias is added once, to the sum of what the ranks computed."""

    doors: Doors

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs / tp) to (..., outputs)."""
        out = self.doors.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class VocabularyParallelLoss(NextTokenLoss):
    """NextTokenLoss for logits whose vocabulary is split over tp."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As NextTokenLoss, with (batch, sequence, vocabulary / tp) logits."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        out: Tensor = _VocabularyCrossEntropy.apply(
            wide.flatten(0, 1), targets.flatten(), self.axis
        )
        return out


def column(module: nn.Module, doors: Doors) -> dict[str, int]:
    """Split a linear layer's outputs: each rank computes some of them."""
    names = ["weight"] if getattr(module, "bias", None) is None else ["weight", "bias"]
    for name in names:
        _shrink(module, name, 0, doors)
    return dict.fromkeys(names, 0)


def row(module: nn.Module, doors: Doors) -> dict[str, int]:
    """Split a linear layer's inputs: each rank computes a part of every output, then g."""
    _shrink(module, "weight", 1, doors)
    module.__class__ = RowParallelLinear
    module.doors = doors  # type: ignore[assignment]  # torch types attributes as tensors or modules
    return {"weight": 1}


def inner(module: nn.Module, doors: Doors) -> dict[str, int]:
    """Split a linear layer's inputs; its output stays a part, which some later `leave` sums."""
    _shrink(module, "weight", 1, doors)
    return {"weight": 1}


def leave(module: nn.Module, doors: Doors) -> dict[str, int]:
    """g behind a module whose output is a part."""
    module.register_forward_hook(lambda _module, _args, out: doors.leave(out))
    return {}


def entry(module: nn.Module, doors: Doors) -> dict[str, int]:
    """f at the door of a module whose first layers are column-parallel: one sum for all of them."""
    module.register_forward_pre_hook(lambda _module, args: (doors.enter(args[0]), *args[1:]))
    return {}


def vocabulary(module: nn.Module, doors: Doors) -> dict[str, int]:
    """Split an embedding's rows."""
    _shrink(module, "weight", 0, doors)
    module.__class__ = VocabularyParallelEmbedding
    module.doors = doors  # type: ignore[assignment]  # torch types attributes as tensors or modules
    return {"weight": 0}


def loss(axis: Axis, *, split: bool) -> NextTokenLoss:
    """The loss of logits that rule `head` has split over `axis`, or that are whole."""
    return VocabularyParallelLoss(axis) if split and axis.size > 1 else NextTokenLoss()


def shard(full: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's part of a whole parameter."""
    return full.chunk(axis.size, dim=dim)[axis.index]


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """(batch, sequence / n, ...) of every rank to (batch, sequence, ...), by index."""
    parts = x.new_empty((axis.size, *x.shape))
    axis.all_gather(parts, x.contiguous())
    return parts.movedim(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """(batch, sequence, ...) summed over the ranks; this rank's shard of the sequence."""
    parts = torch.stack(x.chunk(axis.size, dim=1))
    own = torch.empty_like(parts[0])
    axis.reduce_scatter(own, parts)
    return own


def _own_ids(ids: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Each id as a row of this rank's part (0 where it has none), and whether it has one."""
    local = ids - axis.index * rows
    mine = (local >= 0) & (local < rows)
    return local * mine, mine


def _shrink(module: nn.Module, name: str, dim: int, doors: Doors) -> None:
    """Replace a parameter by this rank's shard of it."""
    whole = getattr(module, name)
    if whole not in doors.shards:
        doors.shards[whole] = nn.Parameter(shard(whole.detach(), dim, doors.axis).clone())
    setattr(module, name, doors.shards[whole])
