"""What did not come back at a restart: numeric.resume-data and numeric.resume-state.

In: lines before and after a restart: counters of samples, digests of batches and of state, learning
rate, loss scale, step. Out: at most one finding. A counter is held against its own line before the
restart, a digest against the one that was saved or expected.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.measures.values import number
from playbooks.rules import numeric_counter, numeric_state

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
_WHEN = re.compile(
    r"^(?:sav\w*|load\w*|restor\w*|resum\w*|at|step|the|checkpoint|ckpt|before|after|re-?start|from)$"
)
_PLACES = re.compile(r"(?i)index|position|offset|cursor|sample|consumed|seen|batch|document|id\b")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Data first where its own numbers say so and no state differs; else state."""
    rows = evidence.measures.rows
    words = [f"{r.text} {v.label}" for r in rows for v in r.values] + [r.text for r in rows]
    both = any(_SAVED.search(w) for w in words) and any(_LOADED.search(w) for w in words)
    if not any(row.attempt for row in rows) and not both:
        return []
    state = _digests(rows, data=False) or numeric_state.ranks(evidence)
    data = _digests(rows, data=True) or numeric_counter.rule(rows) or _repeated(rows)
    if state:
        return state
    return data or numeric_state.rule(rows, policy)


def _is_data(value: Value) -> bool:
    if value.quantity == "data":
        return True
    return value.quantity == "" and _DATA.search(value.label) is not None


def _digests(rows: Sequence[Row], *, data: bool) -> list[Finding]:
    """A digest or count after the restart that is not the expected or saved one."""
    saved: dict[tuple[str, str, str], Value] = {}
    for row in rows:
        for i, value in enumerate(row.values):
            if _is_data(value) != data and value.quantity not in ("", "scale"):
                continue
            expected = next((v for v in row.values[i + 1 :] if _EXPECTED.search(v.label)), None)
            due = expected if row.attempt or _LOADED.search(row.text) else None
            comparable = (
                due is not None
                and _names_state(value)
                and _same_sort(value, due)
                and data == _is_data(value)
            )
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


def _names_state(value: Value) -> bool:
    """A digest, or a place in the data: what was expected of anything else is no resume's."""
    return _is_digest(value) or (
        value.quantity == "data" and _PLACES.search(value.label) is not None
    )


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
        return numeric_state.data_root(
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
        numeric_state.data_root(
            f"Batches after the restart were read before it: that of step {b} is that of step "
            f"{a}, and so for {len(found)} of {len(found) + fresh}.",
            [earlier, row],
            f"batch of step {b} = batch of step {a}",
        )
    ]
