"""Context parallelism: each rank holds some positions of every sequence; attention sees them all.

In: a model and the cp axis. Out: the same model, whose attention works on this rank's positions in
one of two forms. Rank i of n holds chunks i and 2n-1-i of 2n, so that under a causal mask all have
the same work (the "zigzag" of Llama 3, arXiv:2407.21783, and of ring-flash-attention).

    all-gather   every rank fetches all keys and values; their gradients are reduce-scattered back
    ring         keys and values go round, one rank further each turn, while the turn before is
                 computed; online softmax (arXiv:1805.02867) merges turns; in backward their
                 gradients travel along and come home (Liu et al. 2023, arXiv:2310.01889)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

from trainer.model import Attention, rotary_table

if TYPE_CHECKING:
    from trainer.mesh import Axis


def positions(length: int, index: int, size: int) -> Tensor:
    """Which positions of a sequence rank `index` of `size` holds, ascending; int64."""
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat((chunks[index], chunks[2 * size - 1 - index]))


def parallelize(model: nn.Module, axis: Axis, form: str) -> None:
    """Let every attention of `model` work on this rank's positions."""
    if axis.size == 1:
        return
    for module in model.modules():
        if isinstance(module, Attention):
            module.__class__ = _FORMS[form]
            module.axis = axis  # type: ignore[assignment]  # torch types attributes as tensors


class ContextParallelAttention(Attention):
    """Attention of this rank's queries; the forms say how keys and values get here."""

    axis: Axis

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The angles of this rank's `length` positions."""
        whole = length * self.axis.size
        own = positions(whole, self.axis.index, self.axis.size).to(device)
        cos, sin = rotary_table(whole, self.head, self.rope_base, dtype, device)
        return cos[own], sin[own]


class GatheredAttention(ContextParallelAttention):
    """All keys and values are fetched before attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attention.attend, over the positions of all ranks."""
        axis = self.axis
        both: Tensor = _GatherPositions.apply(torch.stack((key, value)), axis)
        length = both.shape[-2]
        own = positions(length, axis.index, axis.size).to(query.device)
        visible = own[:, None] >= torch.arange(length, device=query.device)
        serve = query.shape[1] // key.shape[1]
        key, value = both.repeat_interleave(serve, dim=2).unbind()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible)


class RingAttention(ContextParallelAttention):
    """Keys and values go round."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Attention.attend, over the positions of all ranks."""
        out: Tensor = _Ring.apply(query, key, value, self.axis)
        return out


_FORMS = {"all-gather": GatheredAttention, "ring": RingAttention}


class _GatherPositions(torch.autograd.Function):
    """(..., own positions, head) of every rank to (..., all positions, head), in their order."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = own.new_empty((axis.size, *own.shape))
        axis.all_gather(parts, own.contiguous())
        order = _order(own.shape[-2] * axis.size, axis).to(own.device)
        whole = torch.cat(parts.unbind(), dim=-2)
        return torch.empty_like(whole).index_copy_(-2, order, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        order = _order(grad.shape[-2], axis).to(grad.device)
        parts = torch.stack(grad.index_select(-2, order).chunk(axis.size, dim=-2))
        own = torch.empty_like(parts[0])
        axis.reduce_scatter(own, parts)
        return own, None


def _order(length: int, axis: Axis) -> Tensor:
    """The positions of rank 0, then of rank 1, ..."""
    return torch.cat([positions(length, index, axis.size) for index in range(axis.size)])


class _Ring(torch.autograd.Function):
    """Ring attention; heads of (batch, heads, own positions, head), fewer for keys and values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            grouped = _grouped(query, key)
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            out = torch.zeros_like(grouped, dtype=wide)
            logs = torch.full_like(out[..., :1], -math.inf)
            block = torch.stack((key, value)).contiguous()
            for turn in range(axis.size):
                coming = _pass_on(block, axis) if turn < axis.size - 1 else None
                rows, columns = _visible(turn, axis.index, query.shape[-2])
                _merge(out, logs, rows, *_softmax(grouped[..., rows, :], block[..., columns, :]))
                block = _arrived(coming) if coming else block
            ctx.axis = axis
            ctx.save_for_backward(query, key, value, out, logs)
            return out.flatten(1, 2).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, logs = ctx.saved_tensors
        axis: Axis = ctx.axis
        grouped = _grouped(query, key)
        slope = _grouped(grad, key).to(out.dtype)
        inner = (slope * out).sum(dim=-1, keepdim=True)
        query_slope = torch.zeros_like(out)
        block = torch.stack((key, value)).contiguous()
        block_slope = torch.zeros_like(block, dtype=out.dtype)
        home: _Way | None = None
        for turn in range(axis.size):
            coming = _pass_on(block, axis) if turn < axis.size - 1 else None
            rows, columns = _visible(turn, axis.index, query.shape[-2])
            of_query, of_block = _slopes(
                grouped[..., rows, :], block[..., columns, :], slope[..., rows, :],
                inner[..., rows, :], logs[..., rows, :],
            )  # fmt: skip
            query_slope[..., rows, :] += of_query
            if home:
                block_slope = _arrived(home)
            block_slope[..., columns, :] += of_block
            home = _pass_on(block_slope, axis, tag=1)
            block = _arrived(coming) if coming else block
        key_slope, value_slope = bring_home(home, block_slope)
        return (
            query_slope.flatten(1, 2).to(query.dtype),
            key_slope.to(key.dtype),
            value_slope.to(value.dtype),
            None,
        )


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """(b, heads, s, head) to (b, kv, heads that share a key, s, head)."""
    batch, heads, length, head = query.shape
    return query.reshape(batch, key.shape[1], heads // key.shape[1], length, head)


_Way = tuple[list[dist.Work], Tensor, Tensor]
"""Works under way, what is sent (it must live until then) and where the receive lands."""


def _pass_on(block: Tensor, axis: Axis, tag: int = 0) -> _Way:
    """Begin to give `block` to the next rank and to take the one of the rank before."""
    landing = torch.empty_like(block)
    after = axis.ranks[(axis.index + 1) % axis.size]
    before = axis.ranks[(axis.index - 1) % axis.size]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block, after, group=axis.group, tag=tag),
            dist.P2POp(dist.irecv, landing, before, group=axis.group, tag=tag),
        ]
    )
    return works, block, landing


def _arrived(way: _Way) -> Tensor:
    for work in way[0]:
        work.wait()
    return way[2]


def bring_home(way: _Way | None, own: Tensor) -> Tensor:
    """The gradients of this rank's own keys and values, after a whole round."""
    return own if way is None else _arrived(way)


def _visible(turn: int, index: int, length: int) -> tuple[slice, slice]:
    """Which of this rank's queries see which of the keys that arrive in `turn`.

    Turn 0 has the own keys, all of which matter, under a causal mask. Keys of an earlier rank: only
    their first chunk is old enough, and all queries see it. Of a later rank: the second chunk of
    queries sees both. So every later turn is half a block, without a mask.
    """
    half = length // 2
    if turn == 0:
        return slice(0, length), slice(0, length)
    if turn <= index:
        return slice(0, length), slice(0, half)
    return slice(half, length), slice(0, length)


def _scores(query: Tensor, key: Tensor, wide: torch.dtype) -> Tensor:
    """(b, kv, serve, rows, head) and (b, kv, columns, head) to (b, kv, serve, rows, columns).

    As many rows as columns: the own block, under a causal mask.
    """
    scores = (query @ key[:, :, None].transpose(-1, -2)).to(wide) / math.sqrt(query.shape[-1])
    rows, columns = scores.shape[-2:]
    if rows == columns:
        future = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _softmax(query: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over one block, and the logarithm of the sum of its exponents."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = _scores(query, block[0], wide)
    logs = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - logs).exp() @ block[1][:, :, None].to(wide), logs


def _merge(out: Tensor, logs: Tensor, rows: slice, block: Tensor, block_logs: Tensor) -> None:
    """Add a block to what was seen before, in place: weights are shares of the exponents."""
    before = logs[..., rows, :]
    total = torch.logaddexp(before, block_logs)
    out[..., rows, :] = (before - total).exp() * out[..., rows, :] + (
        block_logs - total
    ).exp() * block
    logs[..., rows, :] = total


def _slopes(
    query: Tensor, block: Tensor, slope: Tensor, inner: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and of stacked keys and values from one block (Dao et al. 2022)."""
    wide = slope.dtype
    key, value = block[0][:, :, None].to(wide), block[1][:, :, None].to(wide)
    share = (_scores(query, block[0], wide) - logs).exp()
    of_scores = share * (slope @ value.transpose(-1, -2) - inner) / math.sqrt(query.shape[-1])
    of_key = (of_scores.transpose(-1, -2) @ query.to(wide)).sum(dim=2)
    of_value = (share.transpose(-1, -2) @ slope).sum(dim=2)
    return of_scores @ key, torch.stack((of_key, of_value))
