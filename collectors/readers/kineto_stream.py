"""The events of a trace of any size, one after the other.

In: an Artifact with a JSON object that holds "traceEvents". Out: what precedes the events, then the
events. Pieces of a few MiB that end where an event ends are decoded at once; where such a piece is
no JSON (an odd layout, a number beyond 64 bits, the end of a cut file) it is decoded event by
event. Memory is bounded by the piece, whatever the file's size.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import orjson

from collectors.readers.artifact import BROKEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from collectors.readers.artifact import Artifact

_HEAD = 16 << 20
_PIECE = 4 << 20
_EVENT = 4 << 20
"""A longer event ends the reading: no profiler writes one."""
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{\s*\"(?:ph|name|cat)\")")
"""Between two events, whose first key is one of these; inside an event it may stand in a string."""


class Stream:
    """The bytes of a trace: what precedes its events, then event after event."""

    def __init__(self, artifact: Artifact, problems: list[str]) -> None:
        self.problems = problems
        self.stream = artifact.open()
        self.buffer = b""
        self.ended = False

    def _more(self) -> bool:
        """Whether another piece came."""
        got = len(self.buffer)
        while not self.ended and len(self.buffer) - got < _PIECE:
            try:
                part = self.stream.read1(_PIECE)
            except BROKEN as wrong:
                self.problems.append(f"the compressed stream breaks off: {wrong}")
                part = b""
            self.ended = not part
            self.buffer += part
        return len(self.buffer) > got

    def head(self) -> dict[str, Any]:
        """Metadata; the buffer then begins inside the list of events."""
        while True:
            found = _EVENTS.search(self.buffer)
            if found:
                text = self.buffer[: found.start()].rstrip().rstrip(b",") + b"}"
                self.buffer = self.buffer[found.end() :]
                return _object(text)
            if len(self.buffer) > _HEAD or not self._more():
                self.problems.append("no list of events was found")
                self.ended, self.buffer = True, b""
                return {}

    def events(self) -> Iterator[dict[str, Any]]:
        """Events until the list ends, breaks off, or one is no JSON."""
        while True:
            while len(self.buffer) < _PIECE and self._more():
                pass
            piece, rest = self._piece()
            try:
                found = orjson.loads(b"[" + piece + b"]") if piece else None
            except orjson.JSONDecodeError:
                found = None
            if found is None:
                yield from self._slowly()
                return
            self.buffer = rest
            yield from (event for event in found if isinstance(event, dict))

    def _piece(self) -> tuple[bytes, bytes]:
        """Whole events, and the rest; nothing where no end of an event is in sight."""
        at = None
        for found in _BETWEEN.finditer(self.buffer, max(0, len(self.buffer) - _EVENT)):
            at = found
        if at is None:
            return b"", self.buffer
        return self.buffer[: at.start() + 1], self.buffer[at.end() :]

    def _slowly(self) -> Iterator[dict[str, Any]]:
        """The rest, event by event."""
        decoder = json.JSONDecoder()
        text, at = self._text(b""), 0
        while True:
            while at < len(text) and text[at] in ", \t\r\n":
                at += 1
            if at < len(text) and text[at] == "]":
                return
            try:
                event, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                left = text[at:].encode("utf-8", "replace")
                if len(left) > _EVENT or not self._more():
                    self.problems.append("the events break off before their end")
                    return
                text, at = self._text(left), 0
                continue
            if isinstance(event, dict):
                yield event

    def _text(self, left: bytes) -> str:
        """`left` and what has been read since, as text."""
        text = (left + self.buffer).decode("utf-8", "replace")
        self.buffer = b""
        return text


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
