"""Who waits for whom: the pending operations of all groups as one graph over ranks.

In: the ledger and the members of each group. Out: for every waiting rank the operation it is in and
the ranks that have not come; and the ranks at the end of all chains, which wait for nobody.

    rank 0 --tp #812--> rank 5        rank 5 is in no operation: the chain begins there
    rank 9 --dp #40---> rank 0

A member is absent only when its own log of that group ends before the operation; one whose rows of
that time are lost (ring buffer) is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from playbooks.ledger import Call, Ledger


@dataclass(frozen=True)
class Wait:
    """`call` is pending on its rank, and these members have not come to it."""

    call: Call
    absent: tuple[int, ...]


@dataclass(frozen=True)
class WaitGraph:
    """All waits. A pending operation that everybody has entered has no absent member."""

    waits: tuple[Wait, ...]

    @property
    def inside(self) -> frozenset[int]:
        """Ranks with a pending operation."""
        return frozenset(w.call.rank for w in self.waits)

    def edges(self, *, sends: bool = True) -> dict[int, set[int]]:
        """rank -> ranks it waits for; `sends` False leaves out sends, which may return at once."""
        out: dict[int, set[int]] = {}
        for wait in self.waits:
            if sends or not wait.call.op.startswith("send"):
                out.setdefault(wait.call.rank, set()).update(wait.absent)
        return out

    def ends(self) -> dict[int, set[int]]:
        """Rank that waits for nobody -> ranks that wait for it, directly or through others."""
        found = _ends(self.edges())
        return found or _ends(self.edges(sends=False))

    def main(self) -> list[Wait]:
        """One wait a rank, with absent members: a collective before a receive before a send."""
        best: dict[int, Wait] = {}
        for wait in self.waits:
            known = best.get(wait.call.rank)
            if wait.absent and (known is None or _weight(wait) < _weight(known)):
                best[wait.call.rank] = wait
        return [best[rank] for rank in sorted(best)]

    def entered(self) -> list[list[Wait]]:
        """Pending operations, the waits of each (group, seq) together, those without absence."""
        out: dict[tuple[int, int, bool], list[Wait]] = {}
        for wait in self.waits:
            if not wait.absent and not wait.call.p2p:
                out.setdefault((wait.call.group, wait.call.seq, False), []).append(wait)
        return list(out.values())


def _weight(wait: Wait) -> tuple[int, int]:
    kind = 0 if not wait.call.p2p else 1 if wait.call.op.startswith("recv") else 2
    return kind, wait.call.issue_ns or 0


def _ends(edges: Mapping[int, set[int]]) -> dict[int, set[int]]:
    out: dict[int, set[int]] = {}
    for waiting in edges:
        seen = {waiting}
        todo = [waiting]
        while todo:
            for other in edges.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        for rank in seen - {waiting}:
            if not edges.get(rank):
                out.setdefault(rank, set()).add(waiting)
    return out


def wait_graph(
    ledger: Ledger,
    members: Mapping[int, tuple[int, ...]],
    gone: Collection[int] = (),
    at_ns: int | None = None,
) -> WaitGraph:
    """The graph at `at_ns` (None: at the end of the records).

    Ranks in `gone` had ended by then and wait for nothing.
    """
    open_then = ledger.unfinished(at_ns)
    pending = np.flatnonzero(open_then & (ledger.group >= 0) & (ledger.rank >= 0))
    if pending.size == 0:
        return WaitGraph(())
    groups = {int(g) for g in ledger.group[pending]}
    last = _last_numbers(ledger, groups, at_ns)
    waits = []
    for row in _earliest(ledger, pending):
        call = ledger.call(row)
        if call.rank in gone:
            continue
        if call.p2p:
            absent = _absent_peer(ledger, call)
        else:
            absent = tuple(
                r for r in members.get(call.group, ()) if last.get((call.group, r), -1) < call.seq
            )
        waits.append(Wait(call, tuple(sorted(absent))))
    return WaitGraph(tuple(sorted(waits, key=lambda w: (w.call.group, w.call.seq, w.call.rank))))


def _earliest(ledger: Ledger, pending: np.ndarray) -> list[int]:
    """The earliest pending collective of each (group, rank), and every pending p2p by peer."""
    best: dict[tuple[int, int, int, int], int] = {}
    order = pending[np.argsort(ledger.seq[pending], kind="stable")]
    for row in order:
        p2p = bool(ledger.p2p[row])
        key = (
            int(ledger.group[row]),
            int(ledger.rank[row]),
            int(ledger.peer[row]) if p2p else -1,
            int(ledger.op[row]) if p2p else -1,
        )
        best.setdefault(key, int(row))
    return list(best.values())


def _last_numbers(
    ledger: Ledger, groups: set[int], at_ns: int | None
) -> dict[tuple[int, int], int]:
    """(group, rank) -> highest collective number that the rank had entered by then."""
    out: dict[tuple[int, int], int] = {}
    before = ledger.issue <= at_ns if at_ns is not None else np.ones(len(ledger), bool)
    for group in groups:
        rows = np.flatnonzero((ledger.group == group) & ~ledger.p2p & before)
        for rank in np.unique(ledger.rank[rows]):
            out[(group, int(rank))] = int(ledger.seq[rows[ledger.rank[rows] == rank]].max())
    return out


def _absent_peer(ledger: Ledger, call: Call) -> tuple[int, ...]:
    """The peer, when it has not issued the other half of this send or receive."""
    if call.peer is None:
        return ()
    other = "recv" if call.op.startswith("send") else "send"
    halves = [i for i, op in enumerate(ledger.ops) if op.startswith(other)]
    there = (
        (ledger.group == call.group)
        & ledger.p2p
        & (ledger.rank == call.peer)
        & (ledger.peer == call.rank)
        & (ledger.seq >= call.seq)
        & np.isin(ledger.op, halves)
    )
    return () if bool(there.any()) else (call.peer,)
