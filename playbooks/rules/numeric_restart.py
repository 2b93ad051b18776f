"""What did not come back at a restart: numeric.resume-data and numeric.resume-state.

In: lines before and after a restart: counters of samples, digests of batches and of state, learning
rate, loss scale, step. Out: at most one finding. A counter is held against its own line before the
restart, a digest against the one that was saved or expected.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from playbooks.measures.values import number
from playbooks.rules import numeric_state
from playbooks.rules.naming import root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.measures.values import Row, Value
    from playbooks.policy import Policy

_EXPECTED = re.compile(r"(?i)\bexpected|should be|\bwanted")
_DATA = re.compile(
    r"(?i)batch|sample|data|ids?\b|token|shuffle|loader|cursor|position|offset|consumed|shard"
)
_STATE = ("weight", "optimizer", "scale", "random")
_SAVED = re.compile(
    r"(?i)\bsav(?:e|ed|ing)\b|wrote|written|before (?:the )?(?:re-?start|stop|crash)|checkpointed"
)
_LOADED = re.compile(r"(?i)\bload|restor|resum|after (?:the )?re-?start")
_COUNTER = re.compile(
    r"(?i)consumed|sample|position|offset|cursor|index|docs?\b|tokens?[ _]seen|seen|first[ _]id|"
    r"batch(?:es)?\b|doc\w*|record|row|id\b"
)
_STEPS = re.compile(
    r"(?i)(?:adam|optim\w*|opt|sched\w*|scaler)[ _.]*(?:state)?[ _.]*(?:step|count|last_epoch|iter)"
)
"""A counter that optimizer or schedule keep of their own."""
_LOADER = re.compile(r"(?i)loader|sampler|data|batch|sample|shard")
_PLACE = re.compile(
    r"(?i)\bposition|\bstart(?:ing|s)?(?:[ _](?:at|from))?[ _](?:index|batch|sample|offset|pos)|"
    r"\bcursor|\boffset|\bskip\w*|start_idx|first (?:batch|sample)|fast-?forward\w*"
)
_WHEN = re.compile(
    r"^(?:sav\w*|load\w*|restor\w*|resum\w*|at|step|the|checkpoint|ckpt|before|after|re-?start|from)$"
)
_LEAST = 3


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Data first where its own numbers say so and no state differs; else state."""
    rows = evidence.measures.rows
    words = [f"{r.text} {v.label}" for r in rows for v in r.values] + [r.text for r in rows]
    both = any(_SAVED.search(w) for w in words) and any(_LOADED.search(w) for w in words)
    if not any(row.attempt for row in rows) and not both:
        return []
    state = _digests(rows, data=False) or numeric_state.ranks(evidence)
    data = _digests(rows, data=True) or _counter(rows) or _position(rows) or _repeated(rows)
    if state:
        return state
    return data or numeric_state.rule(rows, policy)


def _data_root(summary: str, items: Sequence[Row], formula: str) -> Finding:
    return root(
        "numeric.resume-data",
        "likely",
        summary,
        [],
        more=[r.item for r in items],
        excluded=(
            ("numeric.resume-state", "no state that was printed differs from the saved one"),
            ("numeric.sampler-not-reseeded", "it starts at a restart"),
            ("numeric.shards-overlap", "the repetition is over time, not between ranks"),
            ("numeric.divergence", "it is at the restart"),
        ),
        formula=formula,
    )


def _is_data(value: Value) -> bool:
    if value.quantity == "data":
        return True
    return value.quantity == "" and _DATA.search(value.row.text) is not None


def _digests(rows: Sequence[Row], *, data: bool) -> list[Finding]:
    """A digest or count after the restart that is not the expected or saved one."""
    saved: dict[tuple[str, str, str], Value] = {}
    for row in rows:
        for i, value in enumerate(row.values):
            if _is_data(value) != data and value.quantity not in ("", "scale"):
                continue
            expected = next((v for v in row.values[i + 1 :] if _EXPECTED.search(v.label)), None)
            due = expected if row.attempt or _LOADED.search(row.text) else None
            comparable = due is not None and _same_sort(value, due) and data == _is_data(value)
            if due is not None and comparable and due.texts[:1] != value.texts[:1]:
                return [_unlike(value, due, data)]
            if not data and value.quantity not in _STATE and not _is_digest(value):
                continue
            twin = next((v for v in row.values if _twins(value, v)), None)
            if twin is not None and not _alike(value, twin) and data == _is_data(value):
                return [_unlike(twin, value, data)]
            key = (value.quantity, value.name, _plain(value.label))
            words = f"{row.lead} {row.text}"
            if _SAVED.search(words):
                saved[key] = value
                continue
            due = saved.get(key) if _LOADED.search(words) else None
            if due is not None and due.rank == value.rank and not _alike(due, value):
                return [_unlike(value, due, data)]
    return []


def _alike(one: Value, other: Value) -> bool:
    """Equal to the character, or in the digits that were printed."""
    if len(one.texts) != len(other.texts):
        return False
    for a, b in zip(one.texts, other.texts, strict=True):
        x, y = number(a), number(b)
        near = x is not None and y is not None and abs(x - y) <= 1e-3 * max(abs(x), abs(y))
        if a != b and not near:
            return False
    return True


def _is_digest(value: Value) -> bool:
    return number(value.texts[0]) is None and len(value.texts[0]) >= 6


def _twins(one: Value, other: Value) -> bool:
    """Whether one line has the saved and the restored value of one thing side by side."""
    if one is other or not (_SAVED.search(one.label) and _LOADED.search(other.label)):
        return False
    return _plain(one.label) == _plain(other.label)


def _same_sort(one: Value, other: Value) -> bool:
    return (number(one.texts[0]) is None) == (number(other.texts[0]) is None)


def _plain(label: str) -> str:
    """A label without the words that tell when it was printed."""
    words = label.lower().split()
    return " ".join(w for w in words if not _WHEN.match(w))


def _unlike(value: Value, wanted: Value, data: bool) -> Finding:
    name = value.label or value.quantity
    formula = f"{name}: {value.texts[0]} instead of {wanted.texts[0]}"
    if data:
        return _data_root(
            f"After the restart {name} is {value.texts[0]}, and {wanted.texts[0]} was due: data "
            "are repeated or skipped.",
            [value.row, wanted.row],
            formula,
        )
    return numeric_state.state_root(
        f"After the restart {name} is {value.texts[0]} where {wanted.texts[0]} was saved.",
        [wanted.row, value.row],
        formula,
    )


# --- counters ------------------------------------------------------------------------------------


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
                _data_root(
                    f"At step {step} after the restart {label} is {at:.0f}, and {due:.0f} was "
                    f"due: {abs(moved):.0f} samples are {again}.",
                    [old[-1][2], row],
                    f"{old[-1][1]:.0f} + {slope:g} a step * {step - old[-1][0]} = {due:.0f}, "
                    f"printed {at:.0f}",
                )
            ]
    return []


def _behind(label: str, step: int, at: float, due: float, old: Row, new: Row) -> Finding:
    return numeric_state.state_root(
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
                    _data_root(
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


def _repeated(rows: Sequence[Row]) -> list[Finding]:
    """Batch digests or ids after the restart that were read before it, at another step."""
    seen: dict[tuple[str, int | None, tuple[str, ...]], Row] = {}
    found: list[tuple[Row, Row]] = []
    fresh = 0
    for row in rows:
        for value in row.values:
            if value.quantity != "data" or _EXPECTED.search(row.text):
                continue
            if len(value.texts) < 2 and not _is_digest(value):
                continue
            key = (value.label, value.rank, value.texts)
            earlier = seen.setdefault(key, row)
            if row.attempt == 0 or earlier is row:
                fresh += row.attempt > 0
                continue
            same_epoch = earlier.at("epoch") == row.at("epoch")
            moved = earlier.at("step", "batch") != row.at("step", "batch")
            if earlier.attempt < row.attempt and same_epoch and moved:
                found.append((earlier, row))
    if not found or len(found) < fresh:
        return []
    earlier, row = found[0]
    a, b = earlier.at("step", "batch"), row.at("step", "batch")
    return [
        _data_root(
            f"Batches after the restart were read before it: that of step {b} is that of step "
            f"{a}, and so for {len(found)} of {len(found) + fresh}.",
            [earlier, row],
            f"batch of step {b} = batch of step {a}",
        )
    ]
