"""The flight log: what one rank did, written so that the job never pays for it.

Fixed-size records in memory-mapped segments: no lock, no system call and no growing allocation on
the way of a record; SIGKILL loses nothing that was written (the page cache has it); others read it
live; its size is bounded: when `MOST_SEGMENTS` are full, the oldest records are overwritten and
counted as dropped. Strings are interned once, in names.jsonl.

    control.bin     how far it is, for whoever watches (CONTROL)
    flight-NN.bin   segments of RECORD, each record with its serial number (0 = never written)
    names.jsonl     {"n": id, "t": text} · {"g": id, "name", "desc", "ranks", "backend"} · notes
    meta.json       rank, attempt, pid, host, versions

An operation is written when it begins, and completed in place when it ends: what never ended is
seen as open. Writer and reader stand side by side here; the reader trusts nothing it reads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

VERSION = 1
RECORD = struct.Struct("<QBBHHHqqqqqqqihhIIii")
"""serial, kind, state, name, group, dtype, start, begin, end, wait, a, b, seq, step, microbatch,
stage, shape, stack, peer, spare. 0 in a time means: not known (yet)."""
SIZE = RECORD.size
SEGMENT_RECORDS = 32768
MOST_SEGMENTS = 16
CONTROL = struct.Struct("<QqQqqHBB")
"""records, time of the last record or completion, steps done, end of the last step, typical step
(ns), open phase (name id, 0 = none), closed (1 after a regular exit), spare."""
_CONTROL_SIZE = 4096
_MARK = struct.Struct("<Qq")
_FINISH = struct.Struct("<q")
_SERIAL = struct.Struct("<Q")
_PAIR = struct.Struct("<qq")
_OFFSET_END = 32
_OFFSET_WAIT = 40
_OFFSET_A = 48

STEP, PHASE, COLLECTIVE, MEMORY, NUMBER = 1, 2, 3, 4, 5
OPEN, DONE, FAILED = 0, 1, 2

DTYPE = [
    ("serial", "<u8"), ("kind", "u1"), ("state", "u1"), ("name", "<u2"), ("group", "<u2"),
    ("dtype", "<u2"), ("start", "<i8"), ("begin", "<i8"), ("end", "<i8"), ("wait", "<i8"),
    ("a", "<i8"), ("b", "<i8"), ("seq", "<i8"), ("step", "<i4"), ("microbatch", "<i2"),
    ("stage", "<i2"), ("shape", "<u4"), ("stack", "<u4"), ("peer", "<i4"), ("spare", "<i4"),
]  # fmt: skip
"""RECORD as numpy sees it."""

_EPOCH = time.time_ns() - time.monotonic_ns()


def now() -> int:
    """Nanoseconds since the epoch that never jump: one host's ranks share the monotonic clock."""
    return time.monotonic_ns() + _EPOCH


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A file of `size` mapped for writing. Its blocks are reserved here: on a disk that fills up
    later, a write into a hole of the mapping would kill the job with SIGBUS."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(handle)


class Writer:
    """The writing end. Raises OSError only when it is made."""

    def __init__(self, directory: Path, meta: dict[str, Any]) -> None:
        self.directory = directory
        self._names: dict[str, int] = {}
        self._names_path = str(directory / "names.jsonl")
        self._segments: list[mmap.mmap] = [_mapped(directory / "flight-00.bin", self._bytes())]
        self._most = MOST_SEGMENTS
        self._rolled = 0
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._control = _mapped(directory / "control.bin", _CONTROL_SIZE)
        self.note(version=VERSION, record=SIZE)
        target = directory / "meta.json"
        partial = directory / "meta.json.part"
        partial.write_text(json.dumps({**meta, "version": VERSION}))
        partial.replace(target)

    @staticmethod
    def _bytes() -> int:
        return SEGMENT_RECORDS * SIZE

    def note(self, **line: Any) -> None:
        """Append one line to names.jsonl: rare facts (groups, axes, problems).

        Opened each time: a job that closes all descriptors may get ours for a file of its own.
        """
        with contextlib.suppress(OSError), open(self._names_path, "ab", buffering=0) as file:  # noqa: PTH123
            file.write((json.dumps(line) + "\n").encode())

    def name(self, text: str) -> int:
        """The id of `text`, from 1. Past 60,000 texts all further ones share one id."""
        known = self._names.get(text)
        if known is None:
            with self._lock:
                known = self._names.get(text)
                if known is None:
                    if len(self._names) >= 60_000:
                        text = "(too many names)"
                    known = self._names.setdefault(text, len(self._names) + 1)
                    self.note(n=known, t=text[:500])
        return known

    def _roll(self, segment: int) -> None:
        """Make room for `segment`: a new file while the bound allows, else the oldest again."""
        with self._lock:
            if segment <= self._rolled:
                return
            if len(self._segments) < self._most:
                try:
                    path = self.directory / f"flight-{len(self._segments):02d}.bin"
                    self._segments.append(_mapped(path, self._bytes()))
                except OSError as why:
                    self._most = len(self._segments)
                    self.note(problem=f"flight log bounded at {self._most} segments: {why}")
            self._rolled = segment

    def put(
        self,
        kind: int,
        name: int,
        start: int,
        *,
        state: int = OPEN,
        group: int = 0,
        dtype: int = 0,
        begin: int = 0,
        end: int = 0,
        wait: int = 0,
        a: int = 0,
        b: int = 0,
        seq: int = 0,
        step: int = -1,
        microbatch: int = -1,
        stage: int = -1,
        shape: int = 0,
        stack: int = 0,
        peer: int = -1,
    ) -> int:
        """Write one record; returns its slot for `finish`."""
        slot = next(self._count)
        segment, row = divmod(slot, SEGMENT_RECORDS)
        if segment > self._rolled:
            self._roll(segment)
        RECORD.pack_into(
            self._segments[segment % len(self._segments)], row * SIZE,
            slot + 1, kind, state, name, group, dtype, start, begin, end, wait, a, b, seq,
            step, microbatch, stage, shape, stack, peer, 0,
        )  # fmt: skip
        _MARK.pack_into(self._control, 0, slot + 1, end or start)
        return slot

    def _place(self, slot: int) -> tuple[mmap.mmap, int] | None:
        segment, row = divmod(slot, SEGMENT_RECORDS)
        memory = self._segments[segment % len(self._segments)]
        offset = row * SIZE
        if _SERIAL.unpack_from(memory, offset)[0] != slot + 1:
            return None  # overwritten since
        return memory, offset

    def finish(self, slot: int, end: int, state: int = DONE, wait: int = -1) -> None:
        """Complete the record in `slot`; `wait` only when it is known."""
        place = self._place(slot)
        if place is None:
            return
        memory, offset = place
        if wait >= 0:
            _PAIR.pack_into(memory, offset + _OFFSET_END, end, wait)
        else:
            _FINISH.pack_into(memory, offset + _OFFSET_END, end)
        memory[offset + 9] = state
        _FINISH.pack_into(self._control, 8, end)

    def fill(self, slot: int, a: int, b: int) -> None:
        """Set the two values of a record that are known only at its end."""
        place = self._place(slot)
        if place is not None:
            _PAIR.pack_into(place[0], place[1] + _OFFSET_A, a, b)

    def waited(self, slot: int, wait: int) -> None:
        """Set the host's waiting time (phases: the device's time) of a record."""
        place = self._place(slot)
        if place is not None:
            _FINISH.pack_into(place[0], place[1] + _OFFSET_WAIT, wait)

    def progress(self, steps: int, end: int, typical: int) -> None:
        """Publish that `steps` steps are done, the last one at `end`."""
        struct.pack_into("<Qqq", self._control, 16, steps, end, typical)

    def phase(self, name: int) -> None:
        """Publish the innermost open phase; 0 when none is open."""
        struct.pack_into("<H", self._control, 40, name)

    def close(self) -> None:
        """Mark a regular exit. The mapping stays: threads may still write."""
        self._control[42] = 1


@dataclass(frozen=True)
class Group:
    """A process group as one rank knew it."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str


@dataclass
class Log:
    """One rank's flight log, read."""

    directory: Path
    meta: dict[str, Any]
    records: npt.NDArray[np.void]
    """Of DTYPE, by serial."""
    names: dict[int, str] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    """c10d group name -> axis, as the program annotated it."""
    mesh: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"
    dropped: int = 0
    closed: bool = False
    problems: list[str] = field(default_factory=list)


_MOST_ID = 65_535
_MOST_NS = 1 << 62


def _note(line: dict[str, Any], log: Log) -> None:
    """Take one line of names.jsonl. Raises ValueError, KeyError or TypeError for a damaged one."""
    from collectors import edge

    if "n" in line or "g" in line:
        key = edge.whole(line["n" if "n" in line else "g"], 1, _MOST_ID)
        if key is None:
            raise ValueError("no id")
        if "n" in line:
            log.names[key] = str(line["t"])
            return
        ranks = line["ranks"][: edge.MOST_RANKS]
        if any(edge.rank(r) is None for r in ranks):
            raise ValueError("no ranks")
        words = str(line["name"]), str(line["desc"])
        log.groups[key] = Group(*words, tuple(map(int, ranks)), str(line["backend"]))
    elif "axis" in line:
        log.axes[str(line["name"])] = str(line["axis"])
    elif "mesh" in line:
        if any(edge.rank(v) is None for v in line["mesh"].values()):
            raise ValueError("no coordinates")
        log.mesh = {str(k): int(v) for k, v in line["mesh"].items()}
    elif "device" in line:
        log.device = str(line["device"])
    elif "problem" in line:
        log.problems.append(str(line["problem"]))


def _names(path: Path, log: Log) -> None:
    from collectors import edge

    if not path.is_file():
        log.problems.append(f"{path.name} is missing")
    for number, line in edge.lines(path, log.problems):
        try:
            _note(line, log)
        except (ValueError, KeyError, TypeError, AttributeError):
            log.problems.append(f"{path.name} line {number} is not readable")


def _plausible(rows: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which rows of one segment a Writer can have put where they are."""
    import numpy as np

    place = (rows["serial"] - np.uint64(1)) % np.uint64(SEGMENT_RECORDS)
    good: npt.NDArray[np.bool_] = place == np.arange(len(rows), dtype=np.uint64)
    good &= rows["serial"] < np.uint64(1 << 48)
    good &= (rows["kind"] >= STEP) & (rows["kind"] <= NUMBER) & (rows["state"] <= FAILED)
    for column in ("start", "begin", "end", "wait"):
        good &= (rows[column] >= 0) & (rows[column] <= _MOST_NS)
    plain = rows["kind"] != NUMBER  # its `a` holds the bits of a float
    for column in ("a", "b", "seq"):
        near = (rows[column] >= -_MOST_NS) & (rows[column] <= _MOST_NS)
        good &= near | ~plain if column == "a" else near
    return good


def _segment(path: Path, problems: list[str]) -> npt.NDArray[np.void]:
    """The records of one segment; none, and a problem, when it cannot be read."""
    import numpy as np

    size = path.stat().st_size if path.is_file() else 0
    if size != SEGMENT_RECORDS * SIZE:
        problems.append(f"{path.name} is cut or no segment: {size} bytes")
    if not size:
        return np.empty(0, DTYPE)
    try:
        rows = np.fromfile(path, dtype=DTYPE, count=min(size // SIZE, SEGMENT_RECORDS))
    except OSError as why:
        problems.append(f"{path.name}: {why.strerror}")
        return np.empty(0, DTYPE)
    written = rows["serial"] > 0
    good = written & _plausible(rows)
    bad = int(written.sum() - good.sum())
    if bad:
        problems.append(f"{path.name}: {bad} records are damaged; left out")
    return rows[good]


def read(directory: Path) -> Log:
    """Read one rank's log, finished or not. Raises OSError or ValueError without a usable meta."""
    import numpy as np

    from collectors import edge

    problems: list[str] = []
    try:
        meta = edge.meta_facts(edge.load(directory / "meta.json"), problems)
    except ValueError as why:
        raise ValueError(f"meta.json is not readable: {why}") from why
    log = Log(directory, meta, np.empty(0, DTYPE), problems=problems)
    paths = sorted(directory.glob("flight-*.bin"))
    if len(paths) > MOST_SEGMENTS:
        problems.append(f"{len(paths) - MOST_SEGMENTS} files too many named flight-*.bin; not read")
    parts = [_segment(path, problems) for path in paths[:MOST_SEGMENTS]]
    if parts:
        rows = np.concatenate(parts)
        log.records = rows[np.unique(rows["serial"], return_index=True)[1]]
        if len(rows):
            log.dropped = max(0, int(log.records["serial"][-1]) - len(log.records))
    _names(directory / "names.jsonl", log)
    state = control(directory) if (directory / "control.bin").is_file() else None
    log.closed = bool(state and state[6])
    return log


def control(directory: Path) -> tuple[int, ...] | None:
    """What CONTROL holds for one rank now; None when it is not there."""
    try:
        with (directory / "control.bin").open("rb") as handle:
            raw = handle.read(CONTROL.size)
    except OSError:
        return None
    return CONTROL.unpack(raw) if len(raw) == CONTROL.size else None
