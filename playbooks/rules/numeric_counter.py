"""Counters that go on elsewhere after a restart: numeric.resume-data and resume-state by numbers.

In: rows with a step and a count of samples, batches, or of the optimizer's own steps. Out: at most
one finding; a count is held against the straight line that it had before the restart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.numeric_state import data_root, state_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.finding import Finding
    from playbooks.measures.values import Row

_COUNTER = re.compile(
    r"(?i)consumed|sample|position|offset|cursor|index|docs?\b|tokens?[ _]seen|seen|first[ _]id|"
    r"batch(?:es)?\b|doc\w*|record|row|id\b"
)
_STEPS = re.compile(
    r"(?i)(?:adam|optim\w*|opt|sched\w*|scaler)[ _.]*(?:state)?[ _.]*(?:step|count|last_epoch|iter)"
)
_LOADER = re.compile(r"(?i)loader|sampler|data|batch|sample|shard")
_PLACE = re.compile(
    r"(?i)\bposition|\bstart(?:ing|s)?(?:[ _](?:at|from))?[ _](?:index|batch|sample|offset|pos)|"
    r"\bcursor|\boffset|\bskip\w*|start_idx|first (?:batch|sample)|fast-?forward\w*"
)
_LEAST = 3


def rule(rows: Sequence[Row]) -> list[Finding]:
    """Straight lines first, then a place that is 0."""
    return _counter(rows) or _position(rows)


def _series(rows: Sequence[Row]) -> dict[tuple[str, str], list[tuple[int, float, Row]]]:
    """{(source, label): [(step, value, row)]} of counters of data."""
    out: dict[tuple[str, str], list[tuple[int, float, Row]]] = defaultdict(list)
    for row in rows:
        step = row.at("step")
        if step is None:
            continue
        batch = row.at("batch")
        if batch is not None and row.rank in (None, 0):
            out[row.source, "batch of the epoch"].append((step, float(batch), row))
        for value in row.values:
            one = value.number
            counts = (value.quantity == "data" and _COUNTER.search(value.label)) or (
                _STEPS.search(value.label) is not None
            )
            single = one is not None and len(value.texts) == 1 and value.rank in (None, 0)
            if counts and single and one is not None and one == int(one):
                out[row.source, value.label].append((step, one, row))
    return out


def _counter(rows: Sequence[Row]) -> list[Finding]:
    """A count of samples that grows with the step, and goes on elsewhere after the restart."""
    for (_, label), points in _series(rows).items():
        attempts = sorted({r.attempt for _, _, r in points})
        for before, after in pairwise(attempts):
            old = [p for p in points if p[2].attempt == before]
            new = [p for p in points if p[2].attempt == after]
            slope = _slope(old)
            if slope is None or not new:
                continue
            step, at, row = new[0]
            if old[-1][2].at("epoch") != row.at("epoch"):
                continue
            due = old[-1][1] + slope * (step - old[-1][0])
            moved = at - due
            if abs(moved) < 4 * slope or abs(moved) < 0.002 * abs(due):
                continue
            if _STEPS.search(label):
                return [_behind(label, step, at, due, old[-1][2], row)]
            again = "repeated" if moved < 0 else "skipped"
            return [
                data_root(
                    f"At step {step} after the restart {label} is {at:.0f}, and {due:.0f} was "
                    f"due: {abs(moved):.0f} samples are {again}.",
                    [old[-1][2], row],
                    f"{old[-1][1]:.0f} + {slope:g} a step * {step - old[-1][0]} = {due:.0f}, "
                    f"printed {at:.0f}",
                )
            ]
    return []


def _behind(label: str, step: int, at: float, due: float, old: Row, new: Row) -> Finding:
    return state_root(
        f"At step {step} after the restart {label} is {at:.0f}, and {due:.0f} was due: that state "
        "did not come back.",
        [old, new],
        f"{label} at step {step}: {at:.0f} instead of {due:.0f}",
    )


def _position(rows: Sequence[Row]) -> list[Finding]:
    """The loader's place after the restart is 0, though steps were done before it."""
    done = max((row.at("step") or 0 for row in rows if row.attempt == 0), default=0)
    if done <= 0:
        return []
    for row in rows:
        if row.attempt == 0 or not _LOADER.search(row.text):
            continue
        for value in row.values:
            if _PLACE.search(value.label) and value.number == 0 and len(value.texts) == 1:
                return [
                    data_root(
                        f"After the restart {value.label} is 0, though {done} steps were done "
                        "before: the data begin again.",
                        [row],
                        f"{value.label} = 0 at step {done}",
                    )
                ]
    return []


def _slope(points: Sequence[tuple[int, float, Row]]) -> float | None:
    """What the counter grows by in a step, when it is a straight line."""
    steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points) if b[0] > a[0]]
    if len(steps) < _LEAST - 1:
        return None
    typical = median(steps)
    straight = all(abs(s - typical) <= 0.01 * abs(typical) for s in steps)
    return typical if typical > 0 and straight else None
