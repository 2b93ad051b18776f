"""A line that is one JSON object, or a Python dict of plain values, as labelled values.

In: bare text such as `{"rank": 3, "step": 0, "hash": {"embed": "9f3a"}}`. Out: Measured, or None
when the line is no such object. Nested keys are joined; bounded in depth and in count.
"""

from __future__ import annotations

import json
import re
from typing import Any

from collectors.readers.measured import context
from collectors.readers.measured.words import DIGEST, OPAQUE, VALUE, VALUES, Measured

_DEPTH = 4
_PAIRS = 256
_SUBJECT = re.compile(
    r"(?i)^(?:param\w*|check|title|quantity|name|module|tensor|key|layer_?name|weight|what|metric)$"
)
_VARIANT = re.compile(r"(?i)^(?:run|variant|config|setup|case|layout|which|who|mode|split|phase)$")


def read(text: str) -> Measured | None:
    """The values of an object; None for any other line."""
    plain = text.strip()
    if not (plain.startswith("{") and plain.endswith("}")):
        return None
    for tried in (plain, plain.replace("'", '"')):
        try:
            found = json.loads(tried)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return measured(found)
    return None


def measured(found: dict[str, Any]) -> Measured:
    """The values of one object."""
    out = Measured()
    out.head = _subject(found)
    _walk(out, found, [f"{out.head} ::"] if out.head else [], None, 0)
    return out


def _subject(found: dict[str, Any]) -> str:
    """Text values that say of what, or of which run, the numbers are."""
    told = [
        str(v)[:80]
        for k, v in found.items()
        if isinstance(v, str) and (_SUBJECT.match(k) or _VARIANT.match(k))
    ]
    return " ".join(told[:3])


def _walk(
    out: Measured, found: dict[str, Any], path: list[str], rank: str | None, depth: int
) -> None:
    for key, value in found.items():
        if len(out.values) >= _PAIRS:
            return
        if isinstance(value, dict):
            known = context.joined(str(key))
            own = known[1] if known is not None and known[0] == "rank" else rank
            step = [] if own is not rank else [str(key)]
            if depth < _DEPTH:
                _walk(out, value, [*path, *step], own, depth + 1)
            continue
        _one(out, str(key), value, path, rank)


def _one(out: Measured, key: str, value: Any, path: list[str], rank: str | None) -> None:
    texts = _texts(key, value)
    if not texts:
        return
    place = context.key(key.split())
    whole = len(texts) == 1 and re.fullmatch(r"\d{1,12}", texts[0]) is not None
    plain = whole or (place is not None and place[0] in context.FRACTIONS and len(texts) == 1)
    if place is not None and plain and (rank is None or place[0] != "rank"):
        out.context.setdefault(place[0], texts[0])
        return
    known = context.joined(key)
    if known is not None and known[0] == "rank":
        out.values.append((" ".join(path), texts, known[1]))
        return
    out.values.append((" ".join([*path, key]), texts, rank))


def _texts(key: str, value: Any) -> list[str]:
    """A number, a digest or a flat list of them as they would be printed; else []."""
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [repr(value)]
    if isinstance(value, str):
        digest = DIGEST.search(key.replace("_", " ").split()[-1] if key else "") is not None
        return [value] if VALUE.fullmatch(value) or (digest and OPAQUE.match(value)) else []
    if isinstance(value, list):
        parts = [t for v in value[:VALUES] if not isinstance(v, list) for t in _texts(key, v)]
        return parts if len(parts) == min(len(value), VALUES) else []
    return []
