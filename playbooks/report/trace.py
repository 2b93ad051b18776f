"""One job as a trace that Perfetto and chrome://tracing open: every rank on one clock.

In: Evidence. Out: events of the Trace Event Format (JSON object form), one at a time, so that a run
of any size is written in a stream. A rank is a process; its threads are steps, phases (one a depth
of nesting) and, for each axis, the collectives in as many rows as overlap. Times are microseconds
since the first record. Arrows lead from the rank that came last into a collective to the rank that
had waited longest. What still ran at the end is drawn to the end and says so.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks.columns import codes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from playbooks.evidence import Evidence

    Ints = npt.NDArray[np.int64]
    Event = dict[str, Any]

_AXIS_ROOM = 1000
"""Thread numbers kept for each kind of row; more overlaps than that share the last row."""
_LONG_WAIT = 1_000_000
"""Shortest wait, in ns, that gets an arrow: below a millisecond arrows would hide the boxes."""


def events(evidence: Evidence) -> Iterator[Event]:
    """Every event of the run; nothing when no table has a time."""
    span = _span(evidence)
    if span is None:
        return
    yield from _names(evidence)
    yield from _stretches(evidence, "steps", span, 0)
    yield from _stretches(evidence, "phases", span, 1)
    rows: dict[int, int] = {}
    yield from _collectives(evidence, span, rows)
    yield from _arrows(evidence, span, rows)


def origin_ns(evidence: Evidence) -> int | None:
    """The moment that the trace calls 0, in ns since the epoch; None when nothing has a time."""
    span = _span(evidence)
    return None if span is None else span[0]


def _span(evidence: Evidence) -> tuple[int, int] | None:
    """First and last time of any record, ns."""
    data, ledger = evidence.collected, evidence.ledger
    times = [ledger.issue, ledger.end]
    times += [data.ints(t, c) for t in ("steps", "phases") for c in ("start_ns", "end_ns")]
    known = np.concatenate(times)
    known = known[known >= 0]
    return (int(known.min()), int(known.max())) if known.size else None


def _names(evidence: Evidence) -> Iterator[Event]:
    for rank in sorted(evidence.seen):
        row = evidence.rank_rows.get(rank) or {}
        place = [f"{axis}{row[axis]}" for axis in ("pp", "dp", "cp", "tp", "ep")
                 if row.get(axis) is not None]  # fmt: skip
        words = [
            f"rank {rank}",
            *([f"({' '.join(place)})"] if place else []),
            row.get("host") or "",
        ]
        yield _named("process_name", rank, None, " ".join(words).strip())
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}


def _named(what: str, rank: int, thread: int | None, name: str) -> Event:
    event: Event = {"ph": "M", "name": what, "pid": rank, "args": {"name": name}}
    return event if thread is None else event | {"tid": thread}


def _stretches(evidence: Evidence, table: str, span: tuple[int, int], kind: int) -> Iterator[Event]:
    """Steps or phases; those that overlap without nesting get rows of their own."""
    data = evidence.collected
    rank, step = data.ints(table, "rank"), data.ints(table, "step")
    start, end = data.ints(table, "start_ns"), data.ints(table, "end_ns")
    batch = stage = np.full(rank.size, -1, np.int64)
    names: list[str] = []
    code = np.full(rank.size, -1, np.int64)
    if table == "phases":
        code, names = codes(data, table, "phase")
        batch, stage = data.ints(table, "microbatch"), data.ints(table, "stage")
    usable = np.flatnonzero((rank >= 0) & (start >= 0))
    open_ = end < 0
    end = np.where(open_, span[1], end)
    order = usable[np.lexsort((-end[usable], start[usable], rank[usable]))]
    lane = _lanes(rank, start, end, order, nests=True)
    for row, thread, fresh in _threads(rank, order, lane, kind):
        if fresh:
            yield _named("thread_name", int(rank[row]), thread, table)
        title = names[code[row]] if code[row] >= 0 else f"step {step[row]}"
        told = {"step": step, "microbatch": batch, "stage": stage}
        args = {name: int(values[row]) for name, values in told.items() if values[row] >= 0}
        if open_[row]:
            args["unfinished"] = 1
        yield _box(
            title, table, int(rank[row]), thread, (int(start[row]), int(end[row])), span, args
        )


def _collectives(
    evidence: Evidence, span: tuple[int, int], threads: dict[int, int]
) -> Iterator[Event]:
    """All operations by axis; `threads` learns in which thread each row of the ledger is drawn."""
    ledger = evidence.ledger
    axes = [evidence.groups[code].axis for code in range(len(ledger.group_ids))]
    names = sorted(set(axes))
    axis = np.array([*(names.index(a) for a in axes), len(names)], np.int64)[ledger.group]
    open_ = ledger.end < ledger.issue
    end = np.where(open_, span[1], ledger.end)
    for number, name in enumerate([*names, "unknown group"]):
        mine = np.flatnonzero((axis == number) & (ledger.rank >= 0) & (ledger.issue >= 0))
        order = mine[np.lexsort((ledger.issue[mine], ledger.rank[mine]))]
        lane = _lanes(ledger.rank, ledger.issue, end, order, nests=False)
        for row, thread, fresh in _threads(ledger.rank, order, lane, 2 + number):
            threads[row] = thread
            rank = int(ledger.rank[row])
            if fresh:
                yield _named("thread_name", rank, thread, f"{name} collectives")
            call = ledger.call(row)
            label = evidence.groups[call.group].label if call.group >= 0 else None
            told = {
                "group": label, "seq": call.seq, "step": call.step, "peer": call.peer,
                "bytes": call.bytes_in, "dtype": call.dtype, "shape": call.shape,
                "unfinished": 1 if open_[row] else None,
            }  # fmt: skip
            args = {k: v for k, v in told.items() if v is not None}
            times = (int(ledger.issue[row]), int(end[row]))
            yield _box(f"{call.op} #{call.seq}", name, rank, thread, times, span, args)


def _arrows(evidence: Evidence, span: tuple[int, int], threads: dict[int, int]) -> Iterator[Event]:
    """From the last arrival to the first one, for each collective that somebody waited in."""
    ledger = evidence.ledger
    found, instances = ledger.arrivals, ledger.instances
    for at in np.flatnonzero(found.skew_ns >= _LONG_WAIT):
        rows = instances.rows_of(int(found.instance[at]))
        rows = rows[ledger.issue[rows] >= 0]
        first = int(rows[np.argmin(ledger.issue[rows])])
        last = int(rows[np.argmax(ledger.issue[rows])])
        if first not in threads or last not in threads:
            continue
        late = int(ledger.issue[last])
        base = {"name": "waits for", "cat": "wait", "id": int(at), "ts": _us(late, span)}
        for row, end in ((last, {"ph": "s"}), (first, {"ph": "f", "bp": "e"})):
            yield base | end | {"pid": int(ledger.rank[row]), "tid": threads[row]}


def _box(
    name: str,
    kind: str,
    rank: int,
    thread: int,
    times: tuple[int, int],
    span: tuple[int, int],
    args: Event,
) -> Event:
    begin, end = times
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": thread,
        "ts": _us(begin, span),
        "dur": max(0, end - begin) / 1e3,
        "args": args,
    }


def _us(at: int, span: tuple[int, int]) -> float:
    return (at - span[0]) / 1e3


def _threads(
    rank: Ints, order: Ints, lane: Sequence[int], kind: int
) -> Iterator[tuple[int, int, bool]]:
    """(row, thread, whether it is the first of its thread) for each row of `order`."""
    seen: set[tuple[int, int]] = set()
    for row, own in zip(order.tolist(), lane, strict=True):
        thread = kind * _AXIS_ROOM + min(own, _AXIS_ROOM - 1)
        key = (int(rank[row]), thread)
        yield row, thread, key not in seen
        seen.add(key)


def _lanes(rank: Ints, start: Ints, end: Ints, order: Ints, *, nests: bool) -> list[int]:
    """For each row of `order` (by rank, then start) the lowest lane in which it fits.

    Boxes of one lane never overlap; with `nests` one may lie wholly inside another.
    """
    lanes: list[int] = []
    current = -1
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    stacks: list[list[int]] = []
    for row in order.tolist():
        if rank[row] != current:
            current, free, busy, stacks = int(rank[row]), [], [], []
        begin, stop = int(start[row]), int(end[row])
        if nests:
            lanes.append(_nested(stacks, begin, stop))
            continue
        while busy and busy[0][0] <= begin:
            heappush(free, heappop(busy)[1])
        own = heappop(free) if free else len(busy)
        heappush(busy, (stop, own))
        lanes.append(own)
    return lanes


def _nested(stacks: list[list[int]], begin: int, stop: int) -> int:
    """The first lane whose open boxes have ended or hold this one; opens it there."""
    for lane, ends in enumerate(stacks):
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or stop <= ends[-1]:
            ends.append(stop)
            return lane
    stacks.append([stop])
    return len(stacks) - 1
