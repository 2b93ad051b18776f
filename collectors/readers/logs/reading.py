"""What a log yields before the years and ranks that only other lines or files know are filled in.

In: events in the order of their lines. Out: a LogReading, whose rows `close` finishes for its own
file and logs.settle for the pile.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collectors.collected import Reading
from collectors.readers.quote import clean

if TYPE_CHECKING:
    from collectors.readers.logs.prefix import Line
    from collectors.readers.logs.times import Stamp

EVENTS = 200_000
"""More events of one file are counted, not kept."""


@dataclass
class Event:
    """One recognised line."""

    line: Line
    kind: str
    fields: dict[str, Any]
    stamp: Stamp | None = None
    """Its time where the line's own prefix does not hold it."""
    rank: int | None = None
    host: str | None = None
    quote: str | None = None


@dataclass
class Writer:
    """When lines of one (rank, local rank, task) were seen."""

    first: Stamp | None = None
    last: Stamp | None = None


@dataclass
class LogReading(Reading):
    """A Reading whose times may still lack their year."""

    events: list[Event] = field(default_factory=list)
    measured: list[tuple[Line, dict[str, Any]]] = field(default_factory=list)
    """Rows of `measurements` that still lack their rank."""
    years: Counter[int] = field(default_factory=Counter)
    writers: dict[tuple[int | None, int | None, int | None], Writer] = field(default_factory=dict)
    modified_ns: int | None = None
    left_out: int = 0

    def add_event(self, event: Event) -> None:
        """Keep an event, up to the bound."""
        if len(self.events) < EVENTS:
            self.events.append(event)
        else:
            self.left_out += 1

    def saw(self, line: Line) -> None:
        """Remember that this writer was heard."""
        key = (line.rank, line.local_rank, line.task)
        if key == (None, None, None):
            return
        writer = self.writers.setdefault(key, Writer())
        if line.stamp is not None:
            writer.first = writer.first or line.stamp
            writer.last = line.stamp


def row_of(event: Event, rank: int | None, host: str | None, year: int | None) -> dict[str, Any]:
    """The log_events row; `year` None leaves times without a year null."""
    stamp = event.stamp or event.line.stamp
    known = stamp is not None and (stamp.year is not None or year is not None)
    fields = dict(event.fields)
    line = event.line
    if line.pg:
        fields.setdefault("pg_id", line.pg.get("id") or line.pg.get("old"))
        fields.setdefault("pg", line.pg.get("guid") or line.pg.get("old"))
        fields.setdefault("pg_description", line.pg.get("desc"))
    if line.local_rank is not None:
        fields.setdefault("local_rank", line.local_rank)
    return {
        "time_ns": stamp.at(year or 0) if stamp is not None and known else None,
        "rank": rank,
        "host": host,
        "locator": f"line {line.number}",
        "kind": event.kind,
        "fields": json.dumps(fields),
        "quote": clean(event.quote or line.raw),
    }
