"""Messages of several lines: Python tracebacks and torchelastic's failure summary.

In: Lines, in order, of one file; writers may interleave, so a traceback is put together by the key
of its writer. Out: Events, each at the line that says most. Blocks that never end are given up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collectors.readers.logs import times
from collectors.readers.logs.launcher_lines import split_status
from collectors.readers.logs.reading import Event
from collectors.readers.logs.rule import whole
from collectors.readers.quote import clean
from collectors.readers.tracebacks import FRAMES, frame_of, split_exception

if TYPE_CHECKING:
    from collectors.readers.logs.prefix import Line

_OPEN = 4096
"""Writers whose tracebacks are followed at one time."""
_PATIENCE = 200
"""Foreign lines within a traceback before it is given up."""
_MESSAGE = 2000
_START = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_LAUNCHERS = ("torch/distributed/run.py", "torch/distributed/launcher/", "accelerate/commands/")


@dataclass
class _Open:
    """A traceback that is being read."""

    frames: list[str] = field(default_factory=list)
    original: bool = False
    chained: bool = False
    foreign: int = 0
    source: str = ""
    """The line of code of the innermost frame, where Python found it."""


class Tracebacks:
    """Follows the tracebacks of all writers of a file."""

    def __init__(self) -> None:
        self.open: dict[tuple[object, ...], _Open] = {}
        self.chained: set[tuple[object, ...]] = set()
        self.message: dict[tuple[object, ...], Event] = {}

    def feed(self, line: Line) -> Event | None:
        """The event that `line` completes, if it completes one."""
        text = line.text
        key = line.key
        if text.lstrip(" |").endswith(_START):
            if len(self.open) < _OPEN:
                original = "Original Traceback" in text
                self.open[key] = _Open(original=original, chained=key in self.chained)
            self.chained.discard(key)
            self.message.pop(key, None)
            return None
        if text.startswith(_CHAIN):
            self.chained.add(key)
            return None
        block = self.open.get(key)
        if block is None:
            self._continue(line)
            return None
        if text[:1] == " " or not text:
            frame = frame_of(text)
            if frame is not None:
                block.frames.append(frame)
                block.source = ""
            elif text.strip(" ^~") and not block.source:
                block.source = text.strip()
            return None
        found = split_exception(text)
        if found is None:
            block.foreign += 1
            if block.foreign > _PATIENCE:
                del self.open[key]
            return None
        del self.open[key]
        event = _exception(line, block, *found)
        if any(part is not None for part in key):
            self.message[key] = event
        return event

    def _continue(self, line: Line) -> None:
        """Further lines of a message, which a tagged writer's next lines are."""
        event = self.message.get(line.key)
        if event is None:
            return
        said = event.fields["message"]
        ends = line.stamp is not None or line.place is not None or not line.text.strip()
        if ends or len(said) > _MESSAGE or line.text.startswith(("frame #", "terminate called")):
            del self.message[line.key]
            return
        event.fields["message"] = f"{said} {clean(line.text, _MESSAGE)}"[:_MESSAGE]


def _exception(line: Line, block: _Open, kind: str, message: str) -> Event:
    frames = block.frames[::-1][:FRAMES]
    launcher = kind.endswith("ChildFailedError") or any(
        where in frame for frame in frames for where in _LAUNCHERS
    )
    return Event(
        line,
        "python.exception",
        {
            "type": clean(kind, 200),
            "message": clean(message, _MESSAGE),
            "frames": frames,
            "source": clean(block.source, 200),
            "launcher": launcher,
            "chained": block.chained,
            "original": block.original,
            "uncaught": None,
        },
    )


_FAILED = re.compile(r"^\s*(\S.*?) FAILED\s*$")
_RULE = re.compile(r"^\s*([=*-])\1{9,}\s*$")
_ITEM = re.compile(r"^\s*\[(\d{1,6})\]:\s*$")
_FIELD = re.compile(r"^\s+(time|host|rank|exitcode|error_file|traceback|msg)\s*: ?(.*)$")
_RANK = re.compile(r"(\d{1,9})(?: \(local_rank: (\d{1,9})\))?")
_EXIT = re.compile(r"(-?\d{1,9})(?: \(pid: (\d{1,9})\))?")


class Summary:
    """Follows torchelastic's failure summary; one event a failed rank."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.root = False
        self.raw: dict[str, str] = {}
        self.first: Line | None = None
        self.exit_line: Line | None = None
        self.in_trace = False
        self.before: str = ""

    def feed(self, line: Line) -> tuple[bool, Event | None]:
        """(whether the line is part of a summary, the event that it completes)."""
        text = line.text
        ruled = _RULE.match(text)
        if self.name is None:
            failed = _FAILED.match(text)
            if failed and _RULE.match(self.before):
                self.name = clean(failed.group(1), 200)
                self.root = False
            self.before = text
            return self.name is not None, None
        event = self._flush() if ruled or _ITEM.match(text) else None
        if ruled:
            self._rule(ruled.group(1))
        elif text.startswith("Root Cause"):
            self.root = True
        elif text.rstrip() in ("Failures:", "Other Failures:"):
            self.root = False
        elif _ITEM.match(text):
            self.first = line
        elif found := _FIELD.match(text):
            self._field(line, found.group(1), found.group(2))
        elif self.in_trace:
            self._trace(text)
        elif text.strip() not in ("", "<NO_OTHER_FAILURES>"):
            self.name = None  # something else follows: the summary is over
            return False, event
        return True, event

    def _rule(self, mark: str) -> None:
        """`====` behind the root cause ends the summary of torch 1.9 and up."""
        if mark != "-" and self.root:
            self.name = None
            self.before = "=" * 10

    def _field(self, line: Line, name: str, value: str) -> None:
        self.in_trace = name == "traceback"
        self.raw[name] = value.strip()
        if name == "exitcode":
            self.exit_line = line

    def _trace(self, text: str) -> None:
        found = split_exception(text.strip())
        if found:
            self.raw["exception"] = text.strip()

    def _flush(self) -> Event | None:
        raw, first = self.raw, self.exit_line or self.first
        self.raw, self.first, self.exit_line, self.in_trace = {}, None, None, False
        if not raw or first is None:
            return None
        fields: dict[str, Any] = {"root": self.root, "name": self.name}
        rank = _RANK.search(raw.get("rank", ""))
        if rank:
            fields["rank"] = whole(rank.group(1))
            fields["local_rank"] = whole(rank.group(2)) if rank.group(2) else None
        ended = _EXIT.search(raw.get("exitcode", ""))
        if ended:
            fields["exit_code"] = int(ended.group(1))
            fields["pid"] = whole(ended.group(2)) if ended.group(2) else None
            split_status(fields)
        fields["error_file"] = clean(raw["error_file"], 300) if "error_file" in raw else None
        said = raw.get("exception") or raw.get("traceback") or raw.get("msg") or ""
        fields["message"] = clean(said, _MESSAGE)
        when = times.leading(raw.get("time", ""))
        quote = ", ".join(
            f"{k} {raw[k]}" for k in ("time", "host", "rank", "exitcode", "traceback") if k in raw
        )
        return Event(
            first,
            "elastic.failure",
            fields,
            stamp=when[0] if when else None,
            rank=fields.get("rank"),
            host=clean(raw["host"], 100) if raw.get("host") else None,
            quote=quote,
        )

    def close(self) -> Event | None:
        """The failure whose block the end of the file cut."""
        return self._flush() if self.name is not None else None
