"""When a rank can have waited for an operation: the basis of busy time.

In: the ledger, and which groups run on devices. Out: for each row the begin of its wait (the end is
the row's own), and whether it counts. Four kinds of rows:

    measured    the host's wait is in the ledger (work.wait() of Python): exactly that
    device      the operation ran on a device: from its start there to its end
    blocking    nobody measured, and the host resumes after it: from the last issue to the end
    overlapped  nobody measured, and the host goes on (DDP's buckets): only the last of a step, for
                which the step's end has to wait

Blocking and overlapped are told apart by data. With g = time to the rank's next issue and f = time
in flight, g = f + work when the host blocks and g = work when it does not, so the slope of g on f
within one place of the step is 1 or 0. Without variation it counts as overlapped: that
underestimates waits and so accuses nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from playbooks.ledger import Ledger

    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

_SLOPE = 0.5
"""Half way between the two kinds."""
_LEAST_NS = 20_000
"""Spread of times in flight (standard deviation) below which a slope is noise."""


def waits(ledger: Ledger, on_device: Collection[int] = ()) -> tuple[Ints, Flags]:
    """(begin of the wait, whether the row counts), ns; `on_device` are codes of groups."""
    done = (ledger.end >= 0) & (ledger.issue >= 0) & (ledger.rank >= 0)
    device = (ledger.start >= 0) | np.isin(ledger.group, list(on_device))
    measured = ~device & (ledger.wait >= 0)
    begin = np.where(ledger.start >= 0, ledger.start, ledger.issue)
    begin = np.where(measured, ledger.end - ledger.wait, begin)
    count = done & (device | measured | (ledger.p2p & _named(ledger, "recv")))
    open_question = np.flatnonzero(done & ~device & ~measured & ~ledger.p2p)
    if open_question.size:
        _unmeasured(ledger, open_question, begin, count)
    return begin, count & (ledger.end > begin)


def _named(ledger: Ledger, word: str) -> Flags:
    codes = [i for i, op in enumerate(ledger.ops) if op.startswith(word)]
    named: Flags = np.isin(ledger.op, codes)
    return named


def _unmeasured(ledger: Ledger, rows: Ints, begin: Ints, count: Flags) -> None:
    """Fill `begin` and `count` of collectives whose wait nobody measured."""
    order = np.lexsort((ledger.issue, ledger.rank))
    order = order[ledger.issue[order] >= 0]
    place = np.empty(ledger.rank.size, np.int64)
    place[order] = np.arange(order.size)
    issue, rank = ledger.issue[order], ledger.rank[order]
    # Next issue of the same rank, and number of the operation within its step.
    after = np.append(issue[1:], -1)
    after[np.append(rank[1:] != rank[:-1], True)] = -1
    step = ledger.step[order]
    new = np.concatenate(([True], (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])))
    within = np.arange(order.size) - np.maximum.accumulate(np.where(new, np.arange(order.size), 0))
    for group in np.unique(ledger.group[rows]):
        mine = rows[ledger.group[rows] == group]
        at = place[mine]
        if _blocks(ledger, mine, after[at] - ledger.issue[mine], after[at] >= 0, within[at]):
            count[mine] = True
        else:
            count[mine[_last_in_step(ledger, mine)]] = True
    # Whoever issues again before the end was at work until then.
    last = _last_issue_before_end(ledger, rows, issue, rank)
    begin[rows] = np.maximum(begin[rows], last)


def _blocks(ledger: Ledger, mine: Ints, gap: Ints, known: Flags, within: Ints) -> bool:
    """Whether the time to the next issue grows with the time in flight, place by place."""
    flight = (ledger.end[mine] - ledger.issue[mine]).astype(np.float64)
    mine, gap, within, flight = mine[known], gap[known], within[known], flight[known]
    if mine.size < 8:
        return False
    most = int(within.max()) + 1
    _cells, cell = np.unique(ledger.rank[mine] * most + within, return_inverse=True)
    size = np.bincount(cell)
    x = flight - (np.bincount(cell, weights=flight) / size)[cell]
    y = gap - (np.bincount(cell, weights=gap) / size)[cell]
    # A pause of the host between two operations would rule both sums: clip to what is usual.
    bound = 5 * max(float(np.median(np.abs(x))), float(_LEAST_NS))
    x, y = np.clip(x, -bound, bound), np.clip(y, -bound, bound)
    spread = float(np.mean(x * x))
    return spread > _LEAST_NS**2 and float(np.mean(x * y)) > _SLOPE * spread


def _last_in_step(ledger: Ledger, mine: Ints) -> Ints:
    """Positions in `mine` (one group) of the last operation of each rank and step."""
    order = np.lexsort((ledger.issue[mine], ledger.step[mine], ledger.rank[mine]))
    rank, step = ledger.rank[mine][order], ledger.step[mine][order]
    last = np.append((rank[1:] != rank[:-1]) | (step[1:] != step[:-1]), True)
    chosen: Ints = order[last]
    return chosen


def _last_issue_before_end(ledger: Ledger, rows: Ints, issue: Ints, rank: Ints) -> Ints:
    """For each row the latest issue of its rank that lies before its end."""
    out = ledger.issue[rows].copy()
    for one in np.unique(ledger.rank[rows]):
        low, high = np.searchsorted(rank, [one, one + 1])
        own = issue[low:high]
        mine = np.flatnonzero(ledger.rank[rows] == one)
        found = np.searchsorted(own, ledger.end[rows[mine]], side="left") - 1
        out[mine] = own[np.maximum(found, 0)]
    return out
