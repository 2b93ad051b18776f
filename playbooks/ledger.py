"""The collective ledger: all ranks' views of every collective, aligned by (group, seq).

In: Collected. Out: instances (one collective of one group over its members), arrivals, signatures
that differ, and what is still pending. Never aligned by file order, record number or time.
Everything is vectorised; only what a rule reports is turned into objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from playbooks.columns import codes, flags, starts

if TYPE_CHECKING:
    import numpy.typing as npt

    from collectors.collected import Collected

    Ints = npt.NDArray[np.int64]

FREE_SIZES = ("all_to_all", "alltoall", "gather", "scatter", "coalesced", "unknown")
"""Operations whose sizes may legally differ between members: only the operation is compared."""
ROOTED = ("broadcast", "reduce")
"""Operations whose bytes differ between root and others: shapes are compared, bytes are not."""
TOGETHER = (
    "all_reduce",
    "barrier",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
)
"""Operations that no member can leave before all have come."""
_FAR = np.iinfo(np.int64).max


def free_sizes(op: str) -> bool:
    """Whether members may bring different sizes to `op`."""
    return op.startswith(("all_to_all", "alltoall", "gather", "scatter")) or op in FREE_SIZES


@dataclass(frozen=True)
class Call:
    """One rank's view of one operation."""

    row: int
    rank: int
    group: int
    seq: int
    op: str
    dtype: str | None
    shape: str | None
    bytes_in: int | None
    peer: int | None
    issue_ns: int | None
    end_ns: int | None
    step: int | None
    p2p: bool
    pending: bool
    source: str
    locator: str

    @property
    def signature(self) -> tuple[str, str | None, str | None, int | None]:
        """What all members must agree on; sizes only where they must."""
        if free_sizes(self.op):
            return (self.op, None, None, None)
        size = None if self.op in ROOTED else self.bytes_in
        return (self.op, self.dtype, self.shape, size)

    def words(self) -> str:
        """Such as "all_reduce float32 [2, 3]"."""
        parts = [self.op, self.dtype or "", self.shape or ""]
        if self.shape is None and self.bytes_in is not None:
            parts.append(f"{self.bytes_in} B")
        return " ".join(p for p in parts if p)


@dataclass(frozen=True)
class Instances:
    """Collectives aligned over ranks: row numbers sorted by (group, seq, rank), one row a rank."""

    rows: Ints
    first: Ints
    """Position in `rows` at which each instance begins."""
    group: Ints
    seq: Ints

    def rows_of(self, number: int) -> Ints:
        """Row numbers of one instance."""
        end = self.first[number + 1] if number + 1 < self.first.size else self.rows.size
        return self.rows[self.first[number] : end]


class Ledger:
    """Columns of the collectives table and what follows from them."""

    def __init__(self, collected: Collected) -> None:
        name = "collectives"
        self._collected = collected
        self.group, self.group_ids = codes(collected, name, "group_id")
        self.op, self.ops = codes(collected, name, "op")
        self.dtype, self.dtypes = codes(collected, name, "dtype")
        self.shape, self.shapes = codes(collected, name, "shape")
        self.rank = collected.ints(name, "rank")
        self.seq = collected.ints(name, "seq")
        self.bytes_in = collected.ints(name, "bytes_in")
        self.peer = collected.ints(name, "peer")
        self.issue = collected.ints(name, "issue_ns")
        self.start = collected.ints(name, "start_ns")
        self.end = collected.ints(name, "end_ns")
        self.wait = collected.ints(name, "wait_ns")
        self.step = collected.ints(name, "step")
        self.p2p = flags(collected, name, "p2p")
        state, states = codes(collected, name, "state")
        over = [i for i, s in enumerate(states) if s in ("completed", "failed")]
        self.failed = np.isin(state, [i for i, s in enumerate(states) if s == "failed"])
        self.pending = ~np.isin(state, over) & ~((state < 0) & (self.end >= 0))
        self.pending &= ~self._done_elsewhere(np.isin(state, over) & ~self.failed)

    def __len__(self) -> int:
        return int(self.rank.size)

    def _done_elsewhere(self, done: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Rows that only look pending: all other members of the group have completed the operation.

        Such an operation cannot end without this rank's part; its own record came too late (gloo
        marks an operation as retired some time after its end). Only where all members were seen.
        """
        out = np.zeros(self.rank.size, bool)
        waiting = self.pending & ~self.p2p & (self.group >= 0) & (self.seq >= 0)
        if not waiting.any() or not done.any():
            return out
        together = np.array([op in TOGETHER for op in self.ops] or [False])
        for group in np.unique(self.group[waiting]):
            mine = np.flatnonzero((self.group == group) & ~self.p2p)
            members = np.unique(self.rank[mine]).size
            for row in mine[waiting[mine]]:
                same = mine[self.seq[mine] == self.seq[row]]
                others = same[self.rank[same] != self.rank[row]]
                full = np.unique(self.rank[same]).size == members > 1
                if full and together[self.op[row]] and bool(done[others].all()):
                    out[row] = True
        return out

    def unfinished(self, at_ns: int | None) -> npt.NDArray[np.bool_]:
        """What had been issued and not completed: at `at_ns`, or (None) at the end of the records.

        An operation that failed, by a timeout or because its peer went, never completed either.
        """
        never = self.pending | self.failed
        if at_ns is None:
            return never
        return (never | (self.end > at_ns)) & (self.issue <= at_ns)

    def call(self, row: int) -> Call:
        """Row `row` as an object."""
        table = self._collected.tables["collectives"]

        def known(value: int) -> int | None:
            return None if value < 0 else int(value)

        def text(code: int, texts: list[str]) -> str | None:
            return None if code < 0 else texts[code]

        rank = int(self.rank[row])
        return Call(
            row=int(row),
            rank=rank,
            group=int(self.group[row]),
            seq=int(self.seq[row]),
            op=text(int(self.op[row]), self.ops) or "unknown",
            dtype=text(int(self.dtype[row]), self.dtypes),
            shape=text(int(self.shape[row]), self.shapes),
            bytes_in=known(self.bytes_in[row]),
            peer=known(self.peer[row]),
            issue_ns=known(self.issue[row]),
            end_ns=known(self.end[row]),
            step=known(self.step[row]),
            p2p=bool(self.p2p[row]),
            pending=bool(self.pending[row]),
            source=table["source"][int(row)].as_py() or f"ranks/{rank:05d}",
            locator=table["locator"][int(row)].as_py() or f"#{int(self.seq[row])}",
        )

    @cached_property
    def instances(self) -> Instances:
        """All collectives (no p2p) with a group, a number and a rank."""
        usable = np.flatnonzero(~self.p2p & (self.group >= 0) & (self.seq >= 0) & (self.rank >= 0))
        group, seq, rank = self.group[usable], self.seq[usable], self.rank[usable]
        span_rank = int(rank.max(initial=0)) + 1
        span_seq = int(seq.max(initial=0)) + 1
        key = group * span_seq + seq
        both = key * span_rank + rank
        order = np.argsort(both, kind="stable")
        # One call a rank: a second row with the same number is part of a coalesced operation.
        once = order[starts(both[order])]
        rows, keys = usable[once], key[once]
        first = starts(keys)
        return Instances(rows, first, keys[first] // span_seq, keys[first] % span_seq)

    @cached_property
    def differing(self) -> Ints:
        """Numbers of the instances whose members disagree on op, dtype, shape or bytes."""
        found = self.instances
        if found.rows.size == 0:
            return np.zeros(0, np.int64)
        free = np.array([free_sizes(op) for op in self.ops] or [False])
        rooted = np.array([op in ROOTED for op in self.ops] or [False])
        op = self.op[found.rows]
        sizes_free = free[op] | (op < 0)
        wrong = np.zeros(found.first.size, bool)
        for values, ignored in (
            (op, np.zeros(op.size, bool)),
            (self.dtype[found.rows], sizes_free),
            (self.shape[found.rows], sizes_free),
            (self.bytes_in[found.rows], sizes_free | rooted[op]),
        ):
            unknown = ignored | (values < 0)
            low = np.minimum.reduceat(np.where(unknown, _FAR, values), found.first)
            high = np.maximum.reduceat(np.where(unknown, -1, values), found.first)
            wrong |= high > low
        return np.flatnonzero(wrong).astype(np.int64)

    @cached_property
    def arrivals(self) -> Arrivals:
        """Who came last into each collective, and by how much."""
        found = self.instances
        rows = found.rows
        size = np.diff(np.append(found.first, rows.size))
        number = np.repeat(np.arange(found.first.size), size)
        timed = self.issue[rows] >= 0
        rows, number = rows[timed], number[timed]
        order = np.lexsort((self.issue[rows], number))
        rows, number = rows[order], number[order]
        first = starts(number)
        count = np.diff(np.append(first, rows.size))
        several = count >= 2
        first, count = first[several], count[several]
        issue = self.issue[rows]
        last = first + count - 1
        middle = (issue[first + (count - 1) // 2] + issue[first + count // 2]) // 2
        return Arrivals(
            instance=number[first],
            last_rank=self.rank[rows[last]],
            skew_ns=issue[last] - issue[first],
            late_ns=issue[last] - middle,
            alone_ns=issue[last] - issue[last - 1],
        )


@dataclass(frozen=True)
class Arrivals:
    """One entry a collective with at least two timed members."""

    instance: Ints
    last_rank: Ints
    skew_ns: Ints
    """Last arrival minus first."""
    late_ns: Ints
    """Last arrival minus the median arrival."""
    alone_ns: Ints
    """Last arrival minus the one before it: the wait that the last rank alone imposes."""
