"""Finishes logs once the whole pile is known: years of times, one row a process.

In: LogReadings as `log.read` left them. Out: the same, with rows. A time without a year takes the
year that most lines of the pile state, else that of the newest file; the same for all, so that the
order of events across files holds.
"""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from collectors.readers.logs.reading import row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.readers.logs.reading import Event, LogReading
    from collectors.readers.logs.times import Stamp


_FILE_RANK = re.compile(
    r"(?<![a-z])rank[_.-]?(\d{1,7})(?![\d/])[^/]*$|/attempt_\d+/(\d{1,5})/std(?:out|err)\.log$",
    re.IGNORECASE,
)
_PLACED = ("rank.pid", "deepspeed.spawned", "nccl-info.comm")
"""Kinds that tell the process (and often the host) of a rank."""


def settle(readings: Sequence[LogReading]) -> None:
    """Fill `rows` of all readings."""
    year = _year(readings)
    for reading in readings:
        _finish(reading, year)


def _year(readings: Sequence[LogReading]) -> int | None:
    seen: Counter[int] = Counter()
    for reading in readings:
        seen.update(reading.years)
    if seen:
        return max(seen, key=lambda y: (seen[y], y))
    newest = max((r.modified_ns or 0 for r in readings), default=0)
    return dt.datetime.fromtimestamp(newest / 1e9, dt.UTC).year if newest else None


def _ranks_of_locals(reading: LogReading) -> int | None:
    """rank - local rank of this file's node, when the launcher's summary tells; else None."""
    offsets: set[int] = {
        e.fields["rank"] - e.fields["local_rank"]
        for e in reading.events
        if e.kind == "elastic.failure"
        and isinstance(e.fields.get("rank"), int)
        and isinstance(e.fields.get("local_rank"), int)
    }
    if len(offsets) == 1:
        return offsets.pop()
    most = max((local for _, local, _ in reading.writers if local is not None), default=None)
    whole = reading.world_size is not None and most is not None and most + 1 == reading.world_size
    return 0 if whole and not offsets else None


def _first_ranks(reading: LogReading) -> dict[str, int]:
    """First rank of each host, as DeepSpeed's launcher prints the placement."""
    told = next(
        (e.fields.get("hosts") for e in reading.events if e.kind == "deepspeed.world"), None
    )
    out: dict[str, int] = {}
    count = 0
    for host, size in (told or {}).items():
        out[host] = count
        count += size
    if count:
        reading.world_size = max(reading.world_size or 0, count)
    return out


def _rank_of_file(reading: LogReading) -> int | None:
    """The rank that a file is named after, when no line of it is of another writer."""
    found = _FILE_RANK.search(reading.source.path)
    if not found or any(e.kind.startswith(("elastic.", "slurm.")) for e in reading.events):
        return None
    rank = int(next(g for g in found.groups() if g is not None))
    told = {key[0] for key in reading.writers} | {e.rank for e in reading.events}
    return rank if told <= {None, rank} else None


class _Names:
    """Who wrote a line, as far as its own file tells."""

    def __init__(self, reading: LogReading) -> None:
        # srun -l numbers tasks; a task that is a launcher is no rank.
        self.tasks_are_ranks = not any(e.kind.startswith("elastic.") for e in reading.events)
        self.offset = _ranks_of_locals(reading)
        self.first_of = _first_ranks(reading)
        self.largest = max(
            (e.fields.get("size") or 0 for e in reading.events if e.kind == "nccl-info.comm"),
            default=0,
        )
        self.file_rank = _rank_of_file(reading)
        hosts = {e.host or e.line.host for e in reading.events} - {None}
        self.host = hosts.pop() if len(hosts) == 1 else None

    def rank(self, rank: int | None, local: int | None, task: int | None) -> int | None:
        if rank is not None:
            return rank
        if local is not None:
            return None if self.offset is None else local + self.offset
        if task is not None and self.tasks_are_ranks:
            return task
        return self.file_rank

    def of(self, event: Event) -> int | None:
        if event.rank is not None:
            return event.rank
        if event.kind == "rank.pid" and isinstance(event.fields.get("rank"), int):
            return int(event.fields["rank"])
        line = event.line
        local = line.local_rank
        if event.kind in ("deepspeed.spawned", "deepspeed.exit"):
            host = event.host or line.host or self.host
            first, said = self.first_of.get(host or ""), event.fields.get("local_rank")
            return None if first is None or not isinstance(said, int) else first + said
        if (
            event.kind == "nccl-info.comm"
            and line.rank is None
            and local is None
            and line.task is None
        ):
            whole = event.fields.get("size") == self.largest
            return event.fields.get("comm_rank") if whole else None
        if local is None and event.kind == "elastic.worker-exit":
            local = event.fields.get("local_rank")
        return self.rank(line.rank, local, line.task)


def _finish(reading: LogReading, year: int | None) -> None:
    names = _Names(reading)
    path = reading.source.path
    for event in sorted(reading.events, key=lambda e: e.line.number):
        host = event.host or event.line.host or names.host
        row = row_of(event, names.of(event), host, year)
        reading.add("log_events", source=path, **row)
        _process(reading, event, names, row)
    for line, measured in reading.measured:
        rank = names.rank(line.rank, line.local_rank, line.task)
        reading.add("measurements", source=path, rank=rank, **measured)

    def at(stamp: Stamp | None) -> int | None:
        if stamp is None or (stamp.year is None and year is None):
            return None
        return stamp.at(year or 0)

    for (rank, local, task), writer in reading.writers.items():
        found = names.rank(rank, local, task)
        if found is not None:
            reading.add(
                "ranks", rank=found, first_seen_ns=at(writer.first), last_seen_ns=at(writer.last)
            )


def _process(reading: LogReading, event: Event, names: _Names, row: dict[str, Any]) -> None:
    """What an event says about the end of processes."""
    fields = event.fields
    ended = {"exit_code": fields.get("exit_code"), "signal": fields.get("signal")}
    if event.kind == "elastic.failure" and row["rank"] is not None:
        reading.add(
            "ranks",
            rank=row["rank"],
            local_rank=fields.get("local_rank"),
            host=row["host"],
            pid=fields.get("pid"),
            ended_ns=row["time_ns"],
            **ended,
        )
    elif event.kind in _PLACED and row["rank"] is not None and fields.get("pid") is not None:
        local = fields.get("local_rank")
        reading.add(
            "ranks", rank=row["rank"], pid=fields["pid"], host=row["host"], local_rank=local
        )
    elif event.kind == "slurm.task-exit" and names.tasks_are_ranks:
        for task in fields.get("tasks", ()):
            reading.add("ranks", rank=task, host=fields.get("host"), **ended)
