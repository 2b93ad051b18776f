"""Documents inside samples: whose positions may see whose, as one integer a position.

In: targets, in which IGNORE marks the last position of a document. Out: `Documents`, which travels
with a microbatch, and attention that keeps to it: row r sees column c where begin(r) <= c <= r.
Rotary positions do not restart: scores depend on distances only, and those are the same.
Later rows belong to later documents, so what a stretch of rows sees is one stretch of columns:
everything outside is cut away before anything is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ROWS = 512
"""Rows that look for their columns together: fewer save more products and cost more launches."""


class Documents(NamedTuple):
    """Tensors only, so that whatever carries the inputs of a stage carries these."""

    begins: Tensor
    """(samples, positions) int64, ascending: where in the sample the position's document begins (0
    where it began before the sample)."""
    host: Tensor
    """The same on the CPU, where it is decided without waiting for the device what to skip."""

    def at(self, positions: Tensor | slice) -> Documents:
        """Those of some positions, which stay places in the whole sample."""
        return Documents(self.begins[:, positions], self.host[:, positions])

    def to(self, device: torch.device) -> Documents:
        """The same on another device; the host's copy stays."""
        return Documents(self.begins.to(device, non_blocking=True), self.host)


class Tile(NamedTuple):
    """Rows and columns of an attention matrix that have anything to do with each other."""

    rows: slice
    columns: slice
    hidden: Tensor | None
    """Bool (samples or 1, rows, columns), True where the row does not see; None: it sees all."""


def of_targets(targets: Sequence[np.ndarray], ignore: int) -> Documents:
    """The documents of whole samples, from where their targets are `ignore`."""
    ended = np.stack(targets)[:, :-1] == ignore
    begins = np.zeros((len(targets), ended.shape[1] + 1), dtype=np.int64)
    begins[:, 1:] = np.where(ended, np.arange(1, ended.shape[1] + 1), 0)
    host = torch.from_numpy(np.maximum.accumulate(begins, axis=1))
    return Documents(host, host)


def visible_pairs(rows: Tensor, documents: Documents | None, samples: int) -> int:
    """How many (row, column) attention looks at in the rows at these positions of the samples."""
    pairs = samples * int((rows + 1).sum())
    return pairs - int(documents.host.sum()) if documents else pairs


def tile(
    rows: Tensor, columns: Tensor, documents: Documents | None, device: torch.device
) -> Tile | None:
    """What `rows` see of `columns`, without the rows and columns that see or show nothing.

    Both are ascending positions on the CPU, `documents` those of the rows. None: they see nothing.
    """
    first, high = 0, len(rows)
    if documents:
        first = int(torch.searchsorted(columns, documents.host[:, 0].min()))
        high = int((documents.host <= columns[-1]).sum(dim=1).max())
    end = int(torch.searchsorted(columns, rows[-1], right=True))
    if first >= end:
        return None
    low = int(torch.searchsorted(rows, columns[first]))
    if low >= high:
        return None
    own, other = slice(low, high), slice(first, end)
    near = documents.at(own) if documents else None
    return Tile(own, other, _hidden(rows[own], columns[other], near, device))


def _hidden(
    rows: Tensor, columns: Tensor, documents: Documents | None, device: torch.device
) -> Tensor | None:
    """Tile.hidden of these rows and columns; no mask where none is needed."""
    keys, hidden = columns.to(device), None
    if columns[-1] > rows[0]:
        hidden = (keys > rows.to(device)[:, None])[None]
    if documents and documents.host[:, -1].max() > columns[0]:
        before = keys < documents.begins[..., None]
        hidden = before if hidden is None else before | hidden
    return hidden


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    documents: Documents | None,
    *,
    stretch: int,
) -> Tensor:
    """SDPA of the queries at `rows` over the keys and values of all positions.

    All (samples, heads, positions, head). `rows`, on the CPU, come in stretches of `stretch`
    consecutive positions.
    """
    parts = []
    for own in _blocks(len(rows), stretch):
        near = documents and documents.at(own)
        first = int(near.host[:, 0].min()) if near else 0
        seen = torch.arange(first, int(rows[own.stop - 1]) + 1)
        hidden = _hidden(rows[own], seen, near, query.device)
        mask = None if hidden is None else ~hidden[:, None]
        keys = slice(first, first + len(seen))
        parts.append(
            F.scaled_dot_product_attention(
                query[..., own, :], key[..., keys, :], value[..., keys, :], attn_mask=mask
            )
        )
    return torch.cat(parts, dim=-2)


def _blocks(length: int, stretch: int) -> Iterator[slice]:
    """Slices of at most _ROWS that do not cross a multiple of `stretch`."""
    for begin in range(0, length, stretch):
        for low in range(begin, begin + stretch, _ROWS):
            yield slice(low, min(low + _ROWS, begin + stretch))
