"""What a Python traceback's text says: its exception line and its frames.

In: lines as Python prints them. Out: (type, message) and "function (file:line)", innermost first.
"""

from __future__ import annotations

import re

from collectors.readers.quote import clean

FRAMES = 24
"""Innermost frames that are kept."""
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:, in (.+))?')
_EXCEPTION = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|[a-z_]\w*(?:error|exception|Error|Exception)))(?:: ?(.*))?$"
)
_NOT_TYPES = {"INFO", "WARNING", "ERROR", "DEBUG", "CRITICAL", "Traceback", "NOTE", "W", "E", "I"}


def frame_of(line: str) -> str | None:
    """One `File "...", line N, in f` line as "f (file:line)"."""
    found = _FRAME.match(line)
    if not found:
        return None
    function = clean(found.group(3) or "<module>", 120)
    return f"{function} ({clean(found.group(1), 300)}:{found.group(2)})"


def frames_of(text: str) -> list[str]:
    """Frames of a whole traceback, innermost first."""
    frames = [f for line in text.splitlines() if (f := frame_of(line)) is not None]
    return frames[::-1][:FRAMES]


def split_exception(line: str) -> tuple[str, str] | None:
    """(type, message) of the line that ends a traceback; None when it is no such line."""
    found = _EXCEPTION.match(line)
    if not found or found.group(1) in _NOT_TYPES:
        return None
    return found.group(1), (found.group(2) or "").strip()
