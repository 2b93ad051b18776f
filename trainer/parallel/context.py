"""Context parallelism: each rank holds some positions of every sequence; attention sees them all.

In: a model and the cp axis. Out: the same model, whose attention works on this rank's positions in
one of two forms. Rank i of n holds chunks i and 2n-1-i of 2n, so that under a causal mask all have
the same work (the "zigzag" of Llama 3, arXiv:2407.21783, and of ring-flash-attention).

    all-gather   every rank fetches all keys and values; their gradients are reduce-scattered back
    ring         keys and values go round, one rank further each turn, while the turn before is
                 computed; online softmax (arXiv:1805.02867) merges turns; in backward their
                 gradients travel along and come home (Liu et al. 2023, arXiv:2310.01889)

What each rank sends, a layer and microbatch, with b the bytes of its keys and values (2 x samples x
their heads x sequence / n x head elements), and w as many elements in float32, or float64 in that:

    all-gather   (n - 1) b forward, (n - 1) b backward
    ring         (n - 1) b forward, (n - 1) b + n w backward

Documents save products, not bytes: what a rank does not need another behind it may. Work is even
under a causal mask; how even documents leave it depends on where they end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer import documents as documents_file
from trainer.model import Attention, rotary_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.documents import Documents, Tile
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

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
    ) -> Tensor:
        """As Attention.attend, over the positions of all ranks."""
        axis = self.axis
        both: Tensor = _GatherPositions.apply(torch.stack((key, value)), axis)
        own = positions(both.shape[-2], axis.index, axis.size)
        serve = query.shape[1] // key.shape[1]
        key, value = both.repeat_interleave(serve, dim=2).unbind()
        return documents_file.attention(query, key, value, own, documents, stretch=len(own) // 2)


class RingAttention(ContextParallelAttention):
    """Keys and values go round."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
    ) -> Tensor:
        """As Attention.attend, over the positions of all ranks."""
        out: Tensor = _Ring.apply(query, key, value, documents, self.axis)
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
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None,
        axis: Axis,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            grouped = _grouped(query, key)
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            out = torch.zeros_like(grouped, dtype=wide)
            logs = torch.full_like(out[..., :1], -math.inf)
            block = torch.stack((key, value)).contiguous()
            for turn in range(axis.size):
                coming = _pass_on(block, axis) if turn < axis.size - 1 else None
                for rows, columns, hidden in _tiles(turn, query, documents, axis):
                    seen = _softmax(grouped[..., rows, :], block[..., columns, :], hidden)
                    _merge(out, logs, rows, *seen)
                block = _arrived(coming) if coming else block
            ctx.axis, ctx.documents = axis, documents
            ctx.save_for_backward(query, key, value, out, logs)
            return out.flatten(1, 2).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
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
            of_blocks = []
            for rows, columns, hidden in _tiles(turn, query, ctx.documents, axis):
                of_query, of_block = _slopes(
                    grouped[..., rows, :], block[..., columns, :], slope[..., rows, :],
                    inner[..., rows, :], logs[..., rows, :], hidden,
                )  # fmt: skip
                query_slope[..., rows, :] += of_query
                of_blocks.append((columns, of_block))
            if home:
                block_slope = _arrived(home)
            for columns, of_block in of_blocks:
                block_slope[..., columns, :] += of_block
            home = _pass_on(block_slope, axis, tag=1)
            block = _arrived(coming) if coming else block
        key_slope, value_slope = bring_home(home, block_slope)
        return (
            query_slope.flatten(1, 2).to(query.dtype),
            key_slope.to(key.dtype),
            value_slope.to(value.dtype),
            None,
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


def _tiles(turn: int, query: Tensor, documents: Documents | None, axis: Axis) -> Iterator[Tile]:
    """What this rank's queries see of the keys that arrive in `turn`, chunk by chunk of these.

    Without documents, an earlier rank's first chunk is seen by all queries, and both chunks of a
    later rank by the second half of them: half of what the own keys would be if causality hid
    nothing, so every turn costs every rank the same. In the own block the later chunk comes first:
    then each query has seen a key, itself, before it meets columns that its document hides.
    """
    half = query.shape[-2] // 2
    whole = query.shape[-2] * axis.size
    rows = positions(whole, axis.index, axis.size)
    keys = positions(whole, (axis.index - turn) % axis.size, axis.size)
    for at in (half, 0):
        seen = documents_file.tile(rows, keys[at : at + half], documents, query.device)
        if seen is not None:
            columns = slice(at + seen.columns.start, at + seen.columns.stop)
            yield seen._replace(columns=columns)


def _scores(query: Tensor, key: Tensor, hidden: Tensor | None, wide: torch.dtype) -> Tensor:
    """(b, kv, serve, rows, head) and (b, kv, columns, head) to (b, kv, serve, rows, columns)."""
    scores = (query @ key[:, :, None].transpose(-1, -2)).to(wide) / math.sqrt(query.shape[-1])
    return scores if hidden is None else scores.masked_fill(hidden[:, None, None], -math.inf)


def _softmax(query: Tensor, block: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over one block, and the logarithm of the sum of its exponents.

    A row that sees nothing of the block has the logarithm -inf and attends to nothing.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = _scores(query, block[0], hidden, wide)
    logs = scores.logsumexp(dim=-1, keepdim=True)
    shares = (scores - logs.masked_fill(logs == -math.inf, 0.0)).exp()
    return shares @ block[1][:, :, None].to(wide), logs


def _merge(out: Tensor, logs: Tensor, rows: slice, block: Tensor, block_logs: Tensor) -> None:
    """Add a block to what was seen before, in place: weights are shares of the exponents."""
    before = logs[..., rows, :]
    total = torch.logaddexp(before, block_logs)
    out[..., rows, :] = (before - total).exp() * out[..., rows, :] + (
        block_logs - total
    ).exp() * block
    logs[..., rows, :] = total


def _slopes(
    query: Tensor,
    block: Tensor,
    slope: Tensor,
    inner: Tensor,
    logs: Tensor,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and of stacked keys and values from one block (Dao et al. 2022)."""
    wide = slope.dtype
    key, value = block[0][:, :, None].to(wide), block[1][:, :, None].to(wide)
    share = (_scores(query, block[0], hidden, wide) - logs).exp()
    of_scores = share * (slope @ value.transpose(-1, -2) - inner) / math.sqrt(query.shape[-1])
    of_key = (of_scores.transpose(-1, -2) @ query.to(wide)).sum(dim=2)
    of_value = (share.transpose(-1, -2) @ slope).sum(dim=2)
    return of_scores @ key, torch.stack((of_key, of_value))
