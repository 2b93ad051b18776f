"""One JSON document (trainer state, results of a check) as rows of measurements.

In: the bytes of a file. Out: a row for each object in a list, with what the objects around it fix,
and one for the rest of an object; their places are paths such as `log_history[3]`. Bounded in size,
depth and rows. None when the file is no JSON document.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from collectors.readers.artifact import TooLargeError
from collectors.readers.measured import objects
from collectors.readers.measured.words import Measured
from collectors.readers.quote import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from collectors.readers.artifact import Artifact

MOST = 16 << 20
ROWS = 20_000
_DEPTH = 6


def begins(head: bytes) -> bool:
    """Whether a head may be that of one JSON document, and not of JSON lines."""
    text = head.strip()
    if text[:1] not in (b"{", b"["):
        return False
    first = text.split(b"\n", 1)[0].strip()
    if first in (b"{", b"["):
        return True
    if len(text) > len(first) + 1 and first.endswith((b"}", b"]")):
        return False
    return first.startswith((b'{"', b"[{")) and first.endswith((b"}", b"]", b",", b"{", b"["))


def holds_numbers(head: bytes) -> bool:
    """Whether a whole small document has objects in which numbers stand below the top."""
    try:
        found = json.loads(head)
    except (ValueError, RecursionError):
        return False
    nested = found.values() if isinstance(found, dict) else found
    if not isinstance(found, dict | list):
        return False
    return any(isinstance(v, dict | list) and _numbers(v, 0) for v in nested)


def _numbers(found: Any, depth: int) -> bool:
    if isinstance(found, bool):
        return False
    if isinstance(found, int | float):
        return True
    if depth > _DEPTH or not isinstance(found, dict | list):
        return False
    inner = found.values() if isinstance(found, dict) else found
    return any(_numbers(v, depth + 1) for v in list(inner)[:64])


def read(artifact: Artifact) -> list[dict[str, Any]] | None:
    """The rows without source and rank; None when it is no such document or too large."""
    if not begins(artifact.head):
        return None
    try:
        data, _ = artifact.data(MOST)
        found = json.loads(data)
    except (TooLargeError, ValueError, RecursionError):
        return None
    out: list[dict[str, Any]] = []
    for path, told in _rows(found, "", Measured(), 0):
        if len(out) >= ROWS:
            break
        fields = {"context": told.context, "values": told.values, "head": told.head}
        text = clean(f"{path}: {json.dumps({n: v for n, v, _ in told.values})}", 400)
        row = {"locator": path or "top", "kind": "values", "fields": json.dumps(fields)}
        out.append({**row, "text": text, "quote": text})
    return out


def _rows(found: Any, path: str, above: Measured, depth: int) -> Iterator[tuple[str, Measured]]:
    """(path, measured) of every object that has values of its own."""
    if depth > _DEPTH:
        return
    if isinstance(found, list):
        for place, one in enumerate(found):
            if isinstance(one, dict | list):
                yield from _rows(one, f"{path}[{place}]", above, depth + 1)
        return
    if not isinstance(found, dict):
        return
    lists = {k: v for k, v in found.items() if isinstance(v, list) and _of_objects(v)}
    own = objects.measured({k: v for k, v in found.items() if k not in lists})
    own.context = {**above.context, **own.context}
    if not own.head and above.head:
        own.head = above.head
        own.values = [(f"{above.head} :: {n}", v, r) for n, v, r in own.values]
    if own.values or (own.context != above.context and not lists):
        yield path, own
    for key, value in lists.items():
        yield from _rows(value, f"{path}.{key}".lstrip("."), own, depth + 1)


def _of_objects(found: list[Any]) -> bool:
    return any(isinstance(v, dict) for v in found[:8])
