"""Which interval holds which, and how much time each has for itself.

In: arrays of intervals in ns, sorted by (rank, start, -end). Out: arrays of the same length.
Intervals of one rank usually nest (a wait in a phase); where some merely overlap, that rank is
swept one by one, so that every moment still counts exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


def parents(rank: Ints, start: Ints, end: Ints) -> Ints:
    """Row of the interval that directly holds each one of the same rank, -1 where none does.

    How deep one lies is how many began before it less how many ended by then; the one that holds
    it is the last before it a level up. What has no length holds nothing and is held by nothing.
    """
    out = np.full(len(rank), -1, dtype=np.int64)
    long = np.flatnonzero(end > start)
    rank, start, end = rank[long], start[long], end[long]
    depth = np.zeros(len(rank), dtype=np.int64)
    for one in np.unique(rank):
        mine = slice(*np.searchsorted(rank, [one, one + 1]))
        over = np.searchsorted(np.sort(end[mine]), start[mine], side="right")
        depth[mine] = np.arange(mine.stop - mine.start) - over
    for level in range(1, int(depth.max(initial=0)) + 1):
        inner = np.flatnonzero(depth == level)
        outer = np.flatnonzero(depth == level - 1)
        found = outer[np.maximum(np.searchsorted(outer, inner) - 1, 0)]
        holds = (rank[found] == rank[inner]) & (end[found] > start[inner]) & (found < inner)
        out[long[inner[holds]]] = long[found[holds]]
    return out


def alone(rank: Ints, start: Ints, end: Ints) -> Ints:
    """Time in ns that each interval has for itself: where several run, the last begun has it."""
    holder = parents(rank, start, end)
    inner = np.flatnonzero(holder >= 0)
    own: Ints = end - start
    taken = np.zeros(len(rank), dtype=np.int64)
    np.add.at(taken, holder[inner], own[inner])
    out = own - taken
    for one in np.unique(rank[_crossing(rank, start, end, holder)]):
        mine = slice(*np.searchsorted(rank, [one, one + 1]))
        out[mine] = _swept(start[mine], end[mine])
    return out


def _crossing(rank: Ints, start: Ints, end: Ints, holder: Ints) -> npt.NDArray[np.bool_]:
    """Intervals that reach out of the one that holds them, or begin in one that does not."""
    held = holder >= 0
    out = held & (end > end[np.where(held, holder, 0)])
    # An interval that nothing holds must begin after all before it on its rank have ended.
    long = np.flatnonzero(end > start)
    of = rank[long]
    for one in np.unique(of):
        mine = long[slice(*np.searchsorted(of, [one, one + 1]))]
        reach = np.maximum.accumulate(end[mine])
        out[mine[1:]] |= ~held[mine[1:]] & (start[mine[1:]] < reach[:-1])
    return out


def _swept(start: Ints, end: Ints) -> Ints:
    """`alone` of one rank by a stack, whatever overlaps whatever."""
    own = np.zeros(len(start), dtype=np.int64)
    stack: list[int] = []
    now = int(start[0])
    for i, begin in enumerate(start.tolist()):
        while stack and end[stack[-1]] <= begin:
            top = stack.pop()
            own[top] += max(0, int(end[top]) - now)
            now = max(now, int(end[top]))
        if stack:
            own[stack[-1]] += max(0, begin - now)
        now = max(now, begin)
        stack.append(i)
    while stack:
        top = stack.pop()
        own[top] += max(0, int(end[top]) - now)
        now = max(now, int(end[top]))
    return own
