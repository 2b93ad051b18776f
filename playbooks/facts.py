"""Facts that rules share, whatever source told them: ends, exceptions, groups, stacks.

Plain frozen records. Every field that a source may lack is None there, never a default that looks
like knowledge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playbooks.finding import Item
from playbooks.words import label, signal_name

if TYPE_CHECKING:
    from playbooks.knowledge import ErrorClass

NOWHERE = Item("", "", "")
_DIAG = re.compile(r"(?:^|[/\\( ])collectors[/\\]agent[/\\][^ :]*\.py|_diag_agent")
_WORKER = re.compile(r"\w+ worker process \d+|\w+ \d+ on device \d+")


def is_diag(frame: str) -> bool:
    """Whether a frame, or its file, is diag's own agent: never the program's, never to blame."""
    return bool(_DIAG.search(frame))


def worker_error(text: str) -> str | None:
    """The error itself, one line, of an exception that a data worker passed on; else None.

    torch raises the type again with the worker's whole traceback as its message.
    """
    head, marker, nested = text.partition("Original Traceback (most recent call last):")
    if not marker:
        return None
    lines = nested.splitlines()
    files = [i for i, line in enumerate(lines) if line.lstrip().startswith('File "')]
    after = lines[files[-1] + 1 :] if files else lines
    start = next((i for i, line in enumerate(after) if line and not line[0].isspace()), None)
    if start is None:
        return None
    where = _WORKER.search(head)
    error = " ".join(" ".join(after[start:]).split())
    return f"{error} (in {where[0]})" if where else error


@dataclass(frozen=True)
class End:
    """How one rank's process ended. Every field but rank and item may be unknown."""

    rank: int
    signal: int | None
    exit_code: int | None
    at_ns: int | None
    closed: bool | None
    host: str | None
    item: Item = NOWHERE

    @property
    def words(self) -> str:
        """Such as "signal 9 (SIGKILL)"."""
        if self.signal:
            return f"signal {self.signal} ({signal_name(self.signal)})"
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        return "no exit code on record"


@dataclass(frozen=True)
class Raised:
    """An exception that ended a rank (or was logged as if it had)."""

    rank: int | None
    kind: ErrorClass
    text: str
    """Type and message, one line."""
    traceback: str
    at_ns: int | None
    host: str | None
    item: Item


@dataclass(frozen=True)
class Group:
    """A process group and its members."""

    id: str
    axis: str
    members: tuple[int, ...]
    declared: bool
    """Whether a source lists the members; else they are the ranks that were seen in it."""
    backend: str | None = None

    @property
    def label(self) -> str:
        """Such as "tp[4..7]"."""
        return label(self.axis, self.members)


@dataclass(frozen=True)
class Stack:
    """The main thread of one rank at one look."""

    frames: tuple[str, ...]
    state: str | None
    item: Item
    time_ns: int | None
    cpu_share: float | None = None
    """Cores that its process used between the looks of the capture."""

    @property
    def places(self) -> tuple[str, ...]:
        """The frames without line numbers: what two looks are compared by."""
        return tuple(f.rsplit(":", 1)[0] for f in self.frames)
