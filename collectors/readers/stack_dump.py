"""Stacks of running processes: `py-spy dump` as text or JSON, and `faulthandler` tracebacks.

In: one file with any number of dumps, with the commands and dates that people copy along. Out: rows
of `stacks`, one a thread, innermost frame first; `look` counts the dumps of one process. The rank
is what the command's comment, the environment or the file's name says, else settled by pid later.
A dump that was cut keeps its whole threads.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collectors.collected import Reading, Source
from collectors.readers.artifact import TooLargeError
from collectors.readers.logs import times
from collectors.readers.quote import bare, clean

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact

KIND = "stacks"
_MOST = 64 << 20
_FRAMES = 64
_THREADS = 200_000
_HEAD = re.compile(rb"^(?:Process|Thread|Python) \d+[: (]", re.MULTILINE)
_FAULT = re.compile(
    rb"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):", re.MULTILINE
)
_OF_STACKS = re.compile(rb"\s|Process \d|Thread |Current thread|Python v|[$#]|Timeout")
_THREAD_BYTES = re.compile(rb"^Thread (?:0x[0-9A-Fa-f]+|\d+) \([\w+, ]+\)", re.MULTILINE)
_SHARE = 0.7
"""Share of the lines that belong to stacks, from which a file is a dump and no log."""
_PROCESS = re.compile(r"^Process (\d{1,9}): ?(.*)")
_THREAD = re.compile(r'^Thread (?:0x[0-9A-Fa-f]+|(\d{1,9})) \(([\w+, ]+)\)(?:: "(.*)")?')
_FAULT_THREAD = re.compile(
    r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[(.*?)\])?.*\(most recent call"
)
_FAULT_FRAME = re.compile(r'^  File "([^"]*)", line (\d+|\?\?\?) in (.+)$')
_FRAME = re.compile(r"^\s{2,}(\S.*?) \(([^()]*)\)\s*$")
_RANK = re.compile(r"(?<![a-z])rank[ =:_#-]*(\d{1,7})\b", re.IGNORECASE)
_PID = re.compile(r"--pid[ =](\d{1,9})|\s-p[ =]?(\d{1,9})")
_CTIME = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (\w{3}) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?: (\w+))? (\d{4})"
)
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_FILE_RANK = re.compile(
    r"(?<![a-z])rank[_.-]?(\d{1,7})(?!\d)|(?:^|[/_.-])r(\d{1,5})(?=[_.-])", re.IGNORECASE
)


def sniff(head: bytes) -> bool:
    """A py-spy dump with thread heads, its JSON, or a faulthandler dump and little else."""
    if head.lstrip()[:1] in (b"[", b"{"):
        return b'"frames"' in head and (b'"owns_gil"' in head or b'"os_thread_id"' in head)
    lines = [line for line in head.splitlines() if line.strip()]
    stacks = sum(_OF_STACKS.match(line) is not None for line in lines)
    if stacks < _SHARE * len(lines):
        return False  # a log in which somebody dumped a stack is a log
    if _THREAD_BYTES.search(head) and _HEAD.search(head):
        return True
    return head.lstrip()[:6] in (b"Thread", b"Curren", b"Timeou") and bool(_FAULT.search(head))


@dataclass
class _Dump:
    """What runs over the lines of one file."""

    reading: Reading
    rank: int | None = None
    pid: int | None = None
    time_ns: int | None = None
    said: int | None = None
    own: int | None = None
    """The rank in the file's name."""
    firsts: dict[int, int] = field(default_factory=dict)
    """Rank -> its first process; others under its name are its children (data workers)."""
    looks: dict[object, int] = field(default_factory=dict)
    thread: dict[str, Any] | None = None
    count: int = 0

    def flush(self) -> None:
        """Keep the thread that is complete."""
        row, self.thread = self.thread, None
        if row is None or not row["frames"] or self.count >= _THREADS:
            return
        self.count += 1
        self.reading.add("stacks", source=self.reading.source.path, **row)

    def process(self, pid: int | None) -> None:
        """A new dump begins: of `pid`, for the next time."""
        self.flush()
        self.pid = pid
        self.rank = self.own if self.said is None else self.said
        key = pid if pid is not None else self.rank
        self.looks[key] = self.looks.get(key, -1) + 1

    def begin(self, number: int, name: str, state: str, *, main: bool) -> None:
        """The head of a thread."""
        self.flush()
        key = self.pid if self.pid is not None else self.rank
        if self.rank is not None and self.pid is not None:
            main = main and self.firsts.setdefault(self.rank, self.pid) == self.pid
        self.thread = {
            "look": self.looks.get(key, 0),
            "time_ns": self.time_ns,
            "rank": self.rank,
            "pid": self.pid,
            "thread": clean(name, 100),
            "main": main,
            "frames": [],
            "state": state,
            "locator": f"line {number}",
        }

    def frame(self, text: str) -> None:
        """One frame, innermost first."""
        if self.thread is not None and len(self.thread["frames"]) < _FRAMES:
            self.thread["frames"].append(text)


def _time(text: str) -> int | None:
    found = _CTIME.search(text)
    if found:
        month = _MONTHS.find(found.group(1)) // 3 + 1
        if month:
            day, year = int(found.group(2)), found.group(7)
            text = f"{year}-{month:02d}-{day:02d} {':'.join(found.group(3, 4, 5))}"
    when = times.leading(text.strip())
    if when is None or when[0].year is None:
        return None
    return when[0].at(when[0].year)


def _line(dump: _Dump, number: int, text: str) -> None:
    process = _PROCESS.match(text)
    thread = _THREAD.match(text) or _FAULT_THREAD.match(text)
    if process:
        dump.process(int(process.group(1)))
    elif thread and thread.re is _THREAD:
        state = thread.group(2).replace(", ", "+")
        name = thread.group(3) or f"thread {thread.group(1)}"
        main = name == "MainThread" or (
            thread.group(1) is not None and int(thread.group(1)) == dump.pid
        )
        dump.begin(number, name, "gil" if "gil" in state else state, main=main)
    elif thread:
        # faulthandler prints the main thread last, and names no pid; the current one is marked.
        dump.begin(number, thread.group(2) or thread.group(1), "unknown", main=False)
    elif dump.thread is not None and (found := _FAULT_FRAME.match(text)):
        dump.frame(f"{clean(found.group(3), 120)} ({clean(found.group(1), 300)}:{found.group(2)})")
    elif dump.thread is not None and (found := _FRAME.match(text)):
        dump.frame(f"{clean(found.group(1), 120)} ({clean(found.group(2), 300)})")
    elif text.strip():
        _between(dump, text)


def _between(dump: _Dump, text: str) -> None:
    """A command, its comment or a date between two dumps."""
    if text.startswith("Python v"):
        return
    rank = _RANK.search(text)
    pid = _PID.search(text)
    if pid or text[:1] in "$#" or "py-spy" in text:
        dump.said = int(rank.group(1)) if rank else None
    elif rank:
        dump.said = int(rank.group(1))
    dump.time_ns = _time(text) or dump.time_ns


def _json(reading: Reading, data: bytes, rank: int | None) -> None:
    """`py-spy dump --json`: a list of threads, innermost frame first."""
    threads = json.loads(data)
    if isinstance(threads, dict):
        threads = threads.get("threads")
    if not isinstance(threads, list):
        raise TypeError("no list of threads")
    for i, thread in enumerate(threads[:_THREADS]):
        frames = [
            f"{clean(str(f.get('name')), 120)} "
            f"({clean(str(f.get('filename')), 300)}:{f.get('line')})"
            for f in thread.get("frames", [])[:_FRAMES]
        ]
        name = str(thread.get("thread_name") or f"thread {thread.get('os_thread_id')}")
        state = "gil" if thread.get("owns_gil") else "active" if thread.get("active") else "idle"
        pid = thread.get("pid")
        if frames:
            reading.add(
                "stacks",
                look=0,
                rank=rank,
                pid=pid if isinstance(pid, int) else None,
                thread=clean(name, 100),
                main=name == "MainThread" or thread.get("os_thread_id") == pid,
                frames=frames,
                state=state,
                source=reading.source.path,
                locator=f"thread {i}",
            )


def _file_rank(path: str) -> int | None:
    found = _FILE_RANK.search(path.rsplit("/", 1)[-1])
    return int(found.group(1) or found.group(2)) if found else None


def read(artifact: Artifact) -> Reading:
    """Rows of `stacks`; a problem when the file is cut or is no dump after all."""
    problems: list[str] = []
    reading = Reading(Source(artifact.path, KIND, "all"))
    rank = _file_rank(artifact.path)
    if artifact.head.lstrip()[:1] in (b"[", b"{"):
        try:
            data, broken = artifact.data(_MOST)
            _json(reading, data, rank)
            problems += [broken] if broken else []
        except TooLargeError as wrong:
            problems.append(str(wrong))
        except (ValueError, TypeError, AttributeError, RecursionError) as wrong:
            problems.append(f"no py-spy dump: {wrong}")
    else:
        dump = _Dump(reading, rank=rank, own=rank)
        for number, raw in artifact.lines(problems):
            _line(dump, number, bare(raw[:4096]))
        dump.flush()
        _main_of_faults(reading)
    rows = reading.rows.get("stacks", [])
    if not rows and not problems:
        problems.append("no stack in it")
    told = "all" if rows and not problems else "part" if rows else "none"
    reading.source = Source(artifact.path, KIND, told, tuple(problems))
    return reading


def _main_of_faults(reading: Reading) -> None:
    """faulthandler lists the main thread last; without a named main thread the last one is it."""
    rows = reading.rows.get("stacks", [])
    if rows and not any(row["main"] for row in rows) and rows[-1]["state"] == "unknown":
        rows[-1]["main"] = True
