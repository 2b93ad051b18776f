"""Steps and phases as matrices rank x step, and how long each rank was busy in each step.

In: Collected (steps, phases, collectives). Out: numpy arrays in seconds, NaN where nothing is
known. Busy is step time without the time in which that rank can have waited for an operation:
whoever is waited for waits least, so the rank with the largest busy time sets the pace (the idea of
TraceML's rank-straggler policy, taken from the ledger instead of from phases, so that it also holds
where DDP hides the wait inside backward).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from playbooks.blocking import waits
from playbooks.columns import codes

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from collectors.collected import Collected
    from playbooks.ledger import Ledger

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

NS = 1e9
COMPUTE = ("forward", "backward", "optimizer", "compile")
INPUT = ("data", "h2d")


@dataclass(frozen=True)
class OpenPhase:
    """The phase in which a rank is (or was when it stopped)."""

    rank: int
    phase: str
    step: int | None
    microbatch: int | None
    start_ns: int


def exclusive(start: Ints, end: Ints) -> Ints:
    """Duration of each interval of one thread without the intervals nested in it.

    Any shape of nesting; overlaps that are no nesting are clipped to the outer interval's end.
    """
    own = end - start
    order = np.lexsort((-end, start))
    level = order
    parent = np.full(start.size, -1, np.int64)
    while level.size:
        reach = np.maximum.accumulate(end[level])
        top = np.concatenate(([True], start[level][1:] >= reach[:-1]))
        # A child of the level above belongs to one parent; another parent begins a new run.
        top |= np.concatenate(([True], parent[level][1:] != parent[level][:-1]))
        holder = level[np.maximum.accumulate(np.where(top, np.arange(level.size), 0))]
        inner = ~top
        child, outer = level[inner], holder[inner]
        parent[child] = outer
        if child.size == 0:
            break
        # Only the direct children are taken away here; theirs are taken from them in the next turn.
        clipped = np.minimum(end[child], end[outer]) - start[child]
        reach_in = np.maximum.accumulate(end[child])
        direct = np.concatenate(([True], (start[child][1:] >= reach_in[:-1])))
        direct |= np.concatenate(([True], outer[1:] != outer[:-1]))
        np.subtract.at(own, outer[direct], clipped[direct])
        level = child
    result: Ints = np.maximum(own, 0)
    return result


def covered(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Intervals sorted by start, cut so that they do not overlap: their union, piece by piece."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    before = np.concatenate(([np.iinfo(np.int64).min], reach[:-1]))
    cut = np.maximum(start, before)
    keep = end > cut
    return cut[keep], end[keep]


class Timeline:
    """Matrices over `ranks` x `steps`."""

    def __init__(
        self, collected: Collected, ledger: Ledger, on_device: Collection[int] = ()
    ) -> None:
        self._collected = collected
        self._ledger = ledger
        self._on_device = on_device
        rank = collected.ints("steps", "rank")
        step = collected.ints("steps", "step")
        fine = (rank >= 0) & (step >= 0)
        self.ranks: list[int] = [int(r) for r in np.unique(rank[fine])]
        self.steps: Ints = np.unique(step[fine])
        shape = (len(self.ranks), self.steps.size)
        self.start_ns = np.full(shape, -1, np.int64)
        self.end_ns = np.full(shape, -1, np.int64)
        at = self._cells(rank, step)
        self.start_ns[at[0][fine], at[1][fine]] = collected.ints("steps", "start_ns")[fine]
        self.end_ns[at[0][fine], at[1][fine]] = collected.ints("steps", "end_ns")[fine]
        self.tokens = self._numbers("tokens", at, fine)
        self.loss = self._numbers("loss", at, fine)
        self.ran = self._matrix("cpu_ns", at, fine)
        """Seconds of each step that the training thread ran on a core."""
        self.queued = self._matrix("queued_ns", at, fine)
        """Seconds of each step that it could run but waited for a core."""

    def _cells(self, rank: Ints, step: Ints) -> tuple[Ints, Ints]:
        rows = np.searchsorted(np.array(self.ranks, np.int64), rank)
        return rows.astype(np.int64), np.searchsorted(self.steps, step).astype(np.int64)

    def _numbers(self, column: str, at: tuple[Ints, Ints], fine: npt.NDArray[np.bool_]) -> Floats:
        """One number a step: the first that any rank knows."""
        values = self._collected.floats("steps", column)
        out = np.full(self.steps.size, np.nan)
        known = fine & ~np.isnan(values)
        out[at[1][known][::-1]] = values[known][::-1]
        return out

    def _matrix(self, column: str, at: tuple[Ints, Ints], fine: npt.NDArray[np.bool_]) -> Floats:
        """Nanoseconds of every rank's step, in seconds."""
        out = np.full(self.start_ns.shape, np.nan)
        values = self._collected.floats("steps", column)
        out[at[0][fine], at[1][fine]] = values[fine] / NS
        return out

    @cached_property
    def complete(self) -> npt.NDArray[np.bool_]:
        """Which steps have begun and ended on which rank."""
        return (self.start_ns >= 0) & (self.end_ns >= self.start_ns)

    @cached_property
    def seconds(self) -> Floats:
        """Duration of each step on each rank."""
        return np.where(self.complete, (self.end_ns - self.start_ns) / NS, np.nan)

    @cached_property
    def phases(self) -> dict[str, Floats]:
        """Phase -> exclusive seconds in each step on each rank; 0 where a step had none of it."""
        names, texts = codes(self._collected, "phases", "phase")
        rank = self._collected.ints("phases", "rank")
        step = self._collected.ints("phases", "step")
        start = self._collected.ints("phases", "start_ns")
        end = self._collected.ints("phases", "end_ns")
        fine = np.isin(rank, self.ranks) & np.isin(step, self.steps) & (start >= 0)
        fine &= (end >= start) & (names >= 0)
        rows = np.flatnonzero(fine)
        own = np.zeros(rank.size, np.int64)
        for one in self.ranks:
            mine = rows[rank[rows] == one]
            own[mine] = exclusive(start[mine], end[mine])
        out = {}
        for code, text in enumerate(texts):
            some = rows[names[rows] == code]
            if some.size:
                matrix = np.zeros((len(self.ranks), self.steps.size))
                np.add.at(matrix, self._cells(rank[some], step[some]), own[some] / NS)
                out[text] = matrix
        return out

    def summed(self, names: tuple[str, ...]) -> Floats | None:
        """Seconds in any of these phases, None when no rank has any phase at all."""
        if not self.phases:
            return None
        total = np.zeros((len(self.ranks), self.steps.size))
        for name in names:
            if name in self.phases:
                total += self.phases[name]
        return total

    @cached_property
    def waiting(self) -> Floats:
        """Seconds of each step during which that rank can have waited for an operation."""
        begin, counts = waits(self._ledger, self._on_device)
        usable = np.flatnonzero(counts)
        by_rank = usable[np.argsort(self._ledger.rank[usable], kind="stable")]
        owners = self._ledger.rank[by_rank]
        out = np.zeros((len(self.ranks), self.steps.size))
        for row, rank in enumerate(self.ranks):
            low, high = np.searchsorted(owners, [rank, rank + 1])
            mine = by_rank[low:high]
            known = np.flatnonzero(self.complete[row])
            if mine.size == 0 or known.size == 0:
                continue
            known = known[np.argsort(self.start_ns[row, known], kind="stable")]
            cut, end = covered(begin[mine], self._ledger.end[mine])
            place = np.searchsorted(self.start_ns[row, known], cut, side="right") - 1
            inside = place >= 0
            step = known[place[inside]]
            spent = np.minimum(end[inside], self.end_ns[row, step]) - cut[inside]
            np.add.at(out[row], step, np.maximum(spent, 0) / NS)
        return out

    @cached_property
    def busy(self) -> Floats:
        """Seconds of each step in which that rank waited for nothing.

        Nor for a core: where ranks share cores, the one that the scheduler leaves waiting is not
        slow. Some of the queueing lies inside waits for operations already; what the rank ran on a
        core bounds what is taken away. Ranks on a device keep their wall time: the device worked.
        """
        busy = np.maximum(self.seconds - self.waiting, 0.0)
        host = ~np.isin(np.array(self.ranks, np.int64), list(self._on_device))[:, None]
        known = host & ~np.isnan(self.queued) & ~np.isnan(self.ran)
        own = np.maximum(busy - self.queued, np.minimum(busy, self.ran))
        return np.where(self.complete, np.where(known, own, busy), np.nan)

    def steady(self, warmup: int) -> Ints:
        """Columns of the steps that every rank has finished, without the first `warmup` ones."""
        done = np.flatnonzero(self.complete.all(axis=0)) if self.ranks else np.zeros(0, np.int64)
        return done[warmup:] if done.size > warmup else done

    def open(self, at_ns: int | None = None) -> dict[int, OpenPhase]:
        """The innermost phase of each rank that was open at `at_ns` (None: never closed)."""
        names, texts = codes(self._collected, "phases", "phase")
        rank = self._collected.ints("phases", "rank")
        step = self._collected.ints("phases", "step")
        batch = self._collected.ints("phases", "microbatch")
        start = self._collected.ints("phases", "start_ns")
        end = self._collected.ints("phases", "end_ns")
        unclosed = end < 0
        if at_ns is not None:
            unclosed = (unclosed | (end > at_ns)) & (start <= at_ns)
        out: dict[int, OpenPhase] = {}
        found = np.flatnonzero(unclosed & (rank >= 0) & (names >= 0))
        for row in found[np.argsort(start[found], kind="stable")]:
            number, micro = int(step[row]), int(batch[row])
            out[int(rank[row])] = OpenPhase(
                int(rank[row]),
                texts[names[row]],
                None if number < 0 else number,
                None if micro < 0 else micro,
                int(start[row]),
            )
        return out
