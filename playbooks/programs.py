"""From tables to the programs of steps, which `replay` runs again.

In: Evidence (steps, phases, collectives) and steps. Out: for each step what every rank's host did:
stretches of work cut by the phases, operations where it issued them, and waits where it stood.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from playbooks.blocking import waits
from playbooks.columns import codes
from playbooks.replay import HOST, Await, Event, Issue, Program, Transfer, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from playbooks.evidence import Evidence

    Ints = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max
_LEAST_NS = 2000
"""Shorter stretches are the rounding of clocks between two records."""


def programs(evidence: Evidence, steps: Iterable[int]) -> list[Program]:
    """The program of each of these steps that all ranks have finished."""
    builder = _Builder(evidence)
    return [builder.program(step) for step in steps]


class _Builder:
    """Tables as arrays, sorted so that one rank's step is found by bisection."""

    def __init__(self, evidence: Evidence) -> None:
        self.line, self.ledger = evidence.timeline, evidence.ledger
        ledger, data = self.ledger, evidence.collected
        device = [c for c, g in evidence.groups.items() if "nccl" in (g.backend or "").lower()]
        self.begin, self.counts = waits(ledger, device)
        self.axes = [evidence.groups[code].axis for code in range(len(ledger.group_ids))]
        self.key = _keys(evidence)
        usable = np.flatnonzero((self.key >= 0) & (ledger.issue >= 0) & (ledger.end >= 0))
        self.rows = usable[np.lexsort((ledger.issue[usable], ledger.rank[usable]))]
        self.last_issue, self.count = self._last_issues()
        self.phase, self.names = codes(data, "phases", "phase")
        start, rank = data.ints("phases", "start_ns"), data.ints("phases", "rank")
        fine = np.flatnonzero((start >= 0) & (rank >= 0) & (self.phase >= 0))
        self.phases = fine[np.lexsort((start[fine], rank[fine]))]
        self.phase_rank, self.phase_start = rank, start
        self.phase_end = data.ints("phases", "end_ns")
        self.on_device = bool((data.ints("phases", "device_ns") >= 0).any())
        """Then phases are times of the device, and what lies between them its idling: it arises
        anew from the rest, as waits do (launch delays count as nothing)."""

    def _last_issues(self) -> tuple[Ints, Ints]:
        """For each operation the time of its last issue, and how many issued it."""
        size = int(self.key.max(initial=-1)) + 1
        last, count = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        np.maximum.at(last, self.key[self.rows], self.ledger.issue[self.rows])
        np.add.at(count, self.key[self.rows], 1)
        return last, count

    def program(self, step: int) -> Program:
        column = int(np.searchsorted(self.line.steps, step))
        start, end = self.line.start_ns[:, column], self.line.end_ns[:, column]
        inside = {
            rank: self._between(self.rows, self.ledger.rank, self.ledger.issue, rank, span)
            for rank, *span in zip(self.line.ranks, start.tolist(), end.tolist(), strict=True)
        }
        members: dict[int, int] = defaultdict(int)
        for rows in inside.values():
            for row in rows.tolist():
                members[int(self.key[row])] += 1
        events = {
            rank: self._events(rank, rows, (int(start[i]), int(end[i])))
            for i, (rank, rows) in enumerate(inside.items())
        }
        return Program(step, events, dict(members), float((end - start).max()) / 1e9)

    def _between(self, order: Ints, ranks: Ints, times: Ints, rank: int, span: list[int]) -> Ints:
        """The rows of `order` (by rank, then time) of one rank whose time lies in `span`."""
        low, high = np.searchsorted(ranks[order], [rank, rank + 1])
        mine = order[low:high]
        first, last = np.searchsorted(times[mine], span)
        found: Ints = mine[first:last]
        return found

    def _part(self, row: int, rank: int) -> Transfer:
        ledger, key = self.ledger, int(self.key[row])
        end, last = int(ledger.end[row]), int(self.last_issue[key])
        alone = end < last or self.count[key] < 2
        took = end - (int(ledger.issue[row]) if alone else last)
        axis = self.axes[ledger.group[row]]
        op = ledger.ops[ledger.op[row]] if ledger.op[row] >= 0 else "unknown"
        return Transfer(rank, key, (axis, op), max(0, took) / 1e9, bool(alone))

    def _events(self, rank: int, rows: Ints, span: tuple[int, int]) -> list[Event]:
        """What the host of `rank` did between the two times."""
        parts = {row: self._part(row, rank) for row in rows.tolist()}
        issues = [(int(self.ledger.issue[row]), Issue(part)) for row, part in parts.items()]
        blocks = self._blocks(parts)
        labels = self._labels(rank, span)
        events: list[Event] = []
        at = span[0]
        for begin, end, awaited in [*blocks, (span[1], span[1], [])]:
            before = [one for one in issues if one[0] <= begin]
            issues = issues[len(before) :]
            for when, issue in before:
                at = labels.work(events, at, when)
                events.append(issue)
            at = labels.work(events, at, begin)
            if awaited:
                inner = [one for one in issues if one[0] < end and one[1].part in awaited]
                issues = [one for one in issues if one not in inner]
                events += [issue for _, issue in inner]
                events.append(Await(tuple(awaited)))
            at = max(at, end)
        if self.on_device:
            return [e for e in events if not isinstance(e, Work) or e.label[0] != HOST]
        return _placed(events)

    def _blocks(self, parts: dict[int, Transfer]) -> list[tuple[int, int, list[Transfer]]]:
        """Stretches in which the host waited, and for what; those that mostly overlap are one."""
        spans = sorted(
            (int(self.begin[row]), int(self.ledger.end[row]), row)
            for row in parts
            if self.counts[row]
        )
        out: list[tuple[int, int, list[Transfer]]] = []
        for begin, end, row in spans:
            shorter = min(end - begin, out[-1][1] - out[-1][0]) if out else 0
            if out and out[-1][1] - begin > shorter / 2:
                first, last, together = out[-1]
                out[-1] = (first, max(last, end), [*together, parts[row]])
            else:
                out.append((begin, end, [parts[row]]))
        return out

    def _labels(self, rank: int, span: tuple[int, int]) -> _Labels:
        low, high = np.searchsorted(self.phase_rank[self.phases], [rank, rank + 1])
        mine = self.phases[low:high]
        first, last = np.searchsorted(self.phase_start[mine], span)
        rows = mine[first:last]
        end = np.where(self.phase_end[rows] < 0, span[1], self.phase_end[rows])
        names = [self.names[code] for code in self.phase[rows].tolist()]
        return _Labels(
            rank, list(zip(self.phase_start[rows].tolist(), end.tolist(), names, strict=True))
        )


class _Labels:
    """Which phase a rank is in, moment by moment."""

    def __init__(self, rank: int, phases: list[tuple[int, int, str]]) -> None:
        self.rank = rank
        self.phases = [
            (begin, next_begin if next_begin < end < next_end else end, name)
            for (begin, end, name), (next_begin, next_end, _) in pairwise(
                [*phases, (_NEVER, _NEVER, "")]
            )
        ]
        """Without overlaps that are no nesting: two phases of one host do not run at once."""
        self.changes = sorted({t for begin, end, _ in self.phases for t in (begin, end)})
        self.stretches: dict[int, int] = defaultdict(int)

    def work(self, events: list[Event], at: int, until: int) -> int:
        """Append the stretches from `at` to `until`, cut where the phase changes; the end."""
        if until <= at:
            return at
        cuts = [at, *(t for t in self.changes if at < t < until), until]
        for begin, end in pairwise(cuts):
            if end - begin < _LEAST_NS:
                continue
            events.append(Work(self.rank, self._label(begin), (end - begin) / 1e9))
        return until

    def _label(self, at: int) -> tuple[str, str]:
        """The innermost phase at `at`, which is the one that began last."""
        began = [i for i, (begin, _, _) in enumerate(self.phases) if begin <= at]
        inside = next((i for i in reversed(began) if self.phases[i][1] > at), None)
        if inside is None:
            return (HOST, "")
        self.stretches[inside] += 1
        return (self.phases[inside][2], str(self.stretches[inside]))


def _placed(events: list[Event]) -> list[Event]:
    """The same, with what lies before and after in the labels of stretches outside phases."""
    names = ["begin", *map(_name, events), "end"]
    return [
        replace(event, label=(HOST, f"{names[i]} to {names[i + 2]}"))
        if isinstance(event, Work) and event.label[0] == HOST
        else event
        for i, event in enumerate(events)
    ]


def _name(event: Event) -> str:
    """What an event is called by its neighbours."""
    if isinstance(event, Work):
        return event.label[0]
    part = event.part if isinstance(event, Issue) else event.parts[-1]
    return " ".join(part.label)


def _keys(evidence: Evidence) -> Ints:
    """For each row of the ledger a number that the rows of one operation share, -1 for none.

    A collective is known by group and number; a send and its receive by group, ends and number.
    """
    ledger = evidence.ledger
    send = np.isin(ledger.op, [i for i, op in enumerate(ledger.ops) if op.startswith("send")])
    first = np.where(ledger.p2p, np.where(send, ledger.rank, ledger.peer), -1)
    second = np.where(ledger.p2p, np.where(send, ledger.peer, ledger.rank), -1)
    known = (ledger.group >= 0) & (ledger.seq >= 0) & (ledger.rank >= 0)
    known &= ~ledger.p2p | (ledger.peer >= 0)
    parts = np.stack([ledger.group, ledger.seq, first, second], axis=1)
    out = np.full(ledger.rank.size, -1, np.int64)
    if known.any():
        out[known] = np.unique(parts[known], axis=0, return_inverse=True)[1].reshape(-1)
    return out
