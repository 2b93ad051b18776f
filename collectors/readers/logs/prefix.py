"""Strips what launchers, schedulers and loggers put before a line, and keeps what they say.

In: a line as it stands in the file. Out: a Line: bare text, rank, local rank, task, host, time,
level and the process-group tag. Prefixes nest in any order, such as
`0: [rank0]:[E0311 17:36:25 P.cpp:632] [Rank 0] x`; one after another is taken off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from collectors.readers.logs import times
from collectors.readers.quote import bare

if TYPE_CHECKING:
    from collections.abc import Callable

_DEPTH = 10

_RANK = re.compile(r"\[rank ?(\d{1,7})\]:?\s?", re.IGNORECASE)
_LOCAL = re.compile(r"\[[A-Za-z_]\w*?(\d{1,5})\]:(?!\d)\s?")
_MPI = re.compile(r"\[\d+,(\d{1,7})\]<std(?:err|out|diag)>: ?")
_TASK = re.compile(r"\s{0,4}(\d{1,6}): ?")
_ACTOR = re.compile(r"\((?:[\w.-]+ )?pid=\d+(?:, ip=[\d.]+)?\)\s?")
_GLOG_NEW = re.compile(rf"\[?([IWEFVD]){times.GLOG.pattern}(?: (\d+))? ([\w./+-]+:\d+)\] ?")
_GLOG_OLD = re.compile(r"\[([IWEF]) ([\w./+-]+:\d+)\] ?")
_GLOG_DATED = re.compile(rf"\[([IWEF]) ({times._ISO}) ([\w./+-]+:\d+)\] ?")
_PG = re.compile(
    r"\[PG (?:ID (?P<id>\d+) PG GUID (?P<guid>\w+)|(?P<old>\w+))\s*(?:\((?P<desc>[^)]*)\))?"
    r" Rank (?P<rank>\d{1,7})\]:? ?"
)
_KERNEL = re.compile(r"([\w.-]+) (?:kernel|[\w./-]+(?:\[\d+\])?): ")
_UPTIME = re.compile(r"\[\s*\d+\.\d{6}\] ")
_LEVEL = re.compile(
    r"\[?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\]?[:|]?\s+|"
    r"[-|]\s*(?:[\w.]+\s*[-|]\s*)?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\s*[-|:]\s*"
)
_NUMBER = re.compile(r"\[\d{1,8}\] ")
_PROGRAM = re.compile(r"\[[A-Za-z_][\w.]*\] (?=\d{4}-)")
_BASIC = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL):[A-Za-z_][\w.]*:")
_PLACE = re.compile(r"[\w./-]+\.py:\d+[:\]]? (?=\S)")
_LOGGER = re.compile(r"torch\.distributed\.elastic\.[\w.]+: ")
_SAID_RANK = re.compile(
    r"(?:^|\b)(?:global[_ ])?rank[ =:]+(\d{1,7})\b(?!\s*(?:of|/)?\s*\d*\s*failed)"
)
_NAMED = re.compile(r"(?<![\w-])(?:global[_ ])?rank[ =:]+(\d{1,7})\b", re.IGNORECASE)
_OTHERS = re.compile(
    r"\b(?:from|to|for|of|by|with|than|peer|after|behind) (?:global )?rank", re.IGNORECASE
)
_HOST = re.compile(r"([A-Za-z][A-Za-z0-9.-]*):(?: |$)")


@dataclass
class Line:
    """A line without its prefixes."""

    number: int
    raw: str
    text: str = ""
    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    host: str | None = None
    stamp: times.Stamp | None = None
    level: str | None = None
    place: str | None = None
    """file:line that glog names."""
    pg: dict[str, str | None] = field(default_factory=dict)
    """id, guid or old, desc and rank of a `[PG ...]` tag."""

    @property
    def key(self) -> tuple[object, ...]:
        """Lines of one writer have equal keys; multi-line messages are put together by it."""
        return (self.rank, self.local_rank, self.task, self.host)


def _rank(line: Line, found: re.Match[str]) -> None:
    line.rank = int(found.group(1))


def _local(line: Line, found: re.Match[str]) -> None:
    line.local_rank = int(found.group(1))


def _task(line: Line, found: re.Match[str]) -> None:
    line.task = int(found.group(1))


def _glog(line: Line, found: re.Match[str]) -> None:
    line.level = found.group(1)
    line.stamp = times.stamp(found) or line.stamp
    line.place = found.group(found.re.groups)


def _glog_old(line: Line, found: re.Match[str]) -> None:
    line.level, line.place = found.group(1), found.group(found.re.groups)


def _pg(line: Line, found: re.Match[str]) -> None:
    line.pg = found.groupdict()
    line.rank = int(found.group("rank")) if line.rank is None else line.rank


def _level(line: Line, found: re.Match[str]) -> None:
    line.level = (found.group(1) or found.group(2))[0]


def _basic(line: Line, found: re.Match[str]) -> None:
    line.level = found.group(1)[0]


def _nothing(line: Line, found: re.Match[str]) -> None:
    """A prefix that says nothing we keep."""


def _program(line: Line, found: re.Match[str]) -> None:
    """A program's name, such as `[titan]` before a time."""


_PREFIXES: tuple[tuple[re.Pattern[str], Callable[[Line, re.Match[str]], None]], ...] = (
    (_PG, _pg),
    (_RANK, _rank),
    (_MPI, _rank),
    (_LOCAL, _local),
    (_GLOG_NEW, _glog),
    (_GLOG_DATED, _glog),
    (_GLOG_OLD, _glog_old),
    (_ACTOR, _nothing),
    (_LOGGER, _nothing),
    (_BASIC, _basic),
    (_PLACE, _nothing),
    (_UPTIME, _nothing),
    (_NUMBER, _nothing),
    (_PROGRAM, _program),
    (_LEVEL, _level),
)


class Stripper:
    """Strips lines of one file; it learns which words are host prefixes from `host: [` lines."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()

    def strip(self, number: int, raw: str) -> Line:
        """The Line of one raw line."""
        line = Line(number, raw)
        text = bare(raw).rstrip()
        for turn in range(_DEPTH):
            rest = self._once(line, text, turn)
            if rest is None:
                break
            text = rest
        line.text = text
        if line.rank is None and line.task is None:
            said = _SAID_RANK.match(text.lstrip("[(| "))
            line.rank = int(said.group(1)) if said else None
        return line

    def named(self, line: Line) -> int | None:
        """The one rank that the words of a line speak of, when nothing before them tells it."""
        if line.rank is not None or line.local_rank is not None or line.task is not None:
            return None
        found = _NAMED.findall(line.text)
        if len(set(found)) != 1 or _OTHERS.search(line.text):
            return None
        return int(found[0])

    def _once(self, line: Line, text: str, turn: int) -> str | None:
        """`text` without one more prefix; None when it has none."""
        if not text or text[0] == " ":
            return self._task(line, text, turn)
        timed = times.leading(text) if line.stamp is None or turn < 3 else None
        if timed:
            line.stamp = timed[0]
            return self._after_time(line, text[timed[1] :])
        for pattern, keep in _PREFIXES:
            found = pattern.match(text)
            if found and found.end():
                keep(line, found)
                return text[found.end() :]
        return self._task(line, text, turn) or self._host(line, text)

    def _task(self, line: Line, text: str, turn: int) -> str | None:
        found = _TASK.match(text) if turn == 0 else None
        if not found:
            return None
        _task(line, found)
        rest = text[found.end() :]
        # More than one space before a time in brackets is the trainer's, not an indentation.
        return rest.lstrip(" ") if rest.lstrip(" ").startswith("[") else rest

    def _after_time(self, line: Line, text: str) -> str:
        """Syslog has host and program behind the time."""
        rest = text.lstrip(" |")
        found = _KERNEL.match(rest)
        if found and ("kernel:" in found.group() or "[" in found.group()):
            line.host = found.group(1)
            return rest[found.end() :]
        return rest

    def _host(self, line: Line, text: str) -> str | None:
        found = _HOST.match(text)
        if not found or line.host is not None:
            return None
        name = found.group(1)
        rest = text[found.end() :]
        tagged = times.leading(rest) is not None or re.match(r"\[rank ?\d+\]:", rest) is not None
        if tagged and not name[0].isupper():
            self.hosts.add(name)
        if name not in self.hosts:
            return None
        line.host = name
        return rest
