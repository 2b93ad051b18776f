"""torchelastic error files (`error.json` of a process decorated with `@record`).

In: `{"message": {"message": "ValueError: ...", "extraInfo": {"py_callstack", "timestamp"}}}`, or
`{"message": "text"}` of other writers. Out: one log_events row of kind python.exception
{type, message, frames, local_rank, attempt, error_code, uncaught: true}. The rank is not in it;
the local rank and the restart attempt are in the path.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Any

from collectors.collected import Reading, Source
from collectors.readers.artifact import Artifact, TooLargeError
from collectors.readers.quote import clean
from collectors.readers.tracebacks import frames_of, split_exception

KIND = "torchelastic-error"
BYTES = 16 << 20
_START = re.compile(rb'^\s*\{\s*"message"\s*:')


def sniff(head: bytes) -> bool:
    """A JSON object whose first key is `message`."""
    return _START.match(head) is not None


def _place(path: str) -> tuple[int | None, int | None]:
    """(local rank, attempt) from `.../attempt_0/3/error.json`."""
    parts = PurePath(path).parts
    local = int(parts[-2]) if len(parts) > 1 and parts[-2].isdecimal() else None
    for part in parts:
        found = re.fullmatch(r"attempt_(\d{1,6})", part)
        if found:
            return local, int(found.group(1))
    return local, None


def _event(value: dict[str, Any], path: str) -> dict[str, Any] | None:
    inner = value.get("message")
    detail = inner if isinstance(inner, dict) else {}
    text = detail.get("message") if detail else inner
    if not isinstance(text, str):
        return None
    extra = detail.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = extra.get("py_callstack")
    when = extra.get("timestamp", value.get("timestamp"))
    seconds = (
        int(when) if isinstance(when, str | int) and re.fullmatch(r"\d{1,11}", str(when)) else 0
    )
    local, attempt = _place(path)
    kind, message = split_exception(text) or (None, text)
    return {
        "time_ns": seconds * 1_000_000_000 or None,
        "kind": "python.exception",
        "source": path,
        "locator": "message",
        "quote": clean(text),
        "fields": json.dumps(
            {
                "type": kind,
                "message": clean(message, 2000),
                "frames": frames_of(stack) if isinstance(stack, str) else [],
                "local_rank": local,
                "attempt": attempt,
                "error_code": detail.get("errorCode") if isinstance(detail, dict) else None,
                "uncaught": True,
                "launcher": False,
                "chained": False,
            }
        ),
    }


def read(artifact: Artifact) -> Reading:
    """One event, or a Source that says why there is none."""
    try:
        data, broken = artifact.data(BYTES)
        value = json.loads(data.decode("utf-8", "replace"))
        event = _event(value, artifact.path) if isinstance(value, dict) else None
    except TooLargeError as wrong:
        return Reading(Source(artifact.path, KIND, "none", (str(wrong),)))
    except (ValueError, RecursionError) as wrong:
        return Reading(Source(artifact.path, KIND, "none", (f"the JSON breaks off: {wrong}",)))
    if event is None or broken:
        why = broken or "it holds no message"
        return Reading(Source(artifact.path, KIND, "none", (why,)))
    reading = Reading(Source(artifact.path, KIND, "all"))
    reading.add("log_events", **event)
    return reading
