"""Growth of counters between two readings of one port or link.

In: Evidence. Out: Growth records: counter, where, by how much, the lines. A single reading of a
cumulative counter yields nothing, whatever its value.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.lines import Event

_MOMENT = re.compile(
    r"before|after|start|begin|end|first|last|old|new|early|late|t\d+|\d+|snap\w*|run|pre|post",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Growth:
    """How much one counter of one port (or NVLink) grew."""

    name: str
    host: str
    device: str
    grew: int
    events: tuple[Event, ...]


def _place(event: Event) -> str:
    """The host, else the file's name without what tells the moment of a reading."""
    if event.host:
        return event.host
    stem = PurePath(event.row["source"] or "").name.split(".")[0]
    return _MOMENT.sub("", stem).strip("_-. ") or "host"


def growths(evidence: Evidence) -> list[Growth]:
    """Every counter that two readings, or a difference, show; zero growth included."""
    readings: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
    out = []
    for event in evidence.lines.of("link.counter"):
        values = event.fields.get("values")
        if not isinstance(values, list) or not values:
            continue
        gpu, link = event.number("gpu"), event.number("link")
        device = event.text("device") or (f"GPU {gpu:g} link {link:g}" if gpu is not None else "")
        key = (event.text("name"), _place(event), device)
        if event.fields.get("delta"):
            out.append(Growth(*key, int(values[-1]), (event,)))
        elif len(values) > 1:
            out.append(Growth(*key, max(0, int(values[1]) - int(values[0])), (event,)))
        else:
            readings[key].append(event)
    for key, events in readings.items():
        if len(events) > 1:
            grew = int(events[-1].fields["values"][0]) - int(events[0].fields["values"][0])
            out.append(Growth(*key, max(0, grew), (events[0], events[-1])))
    return out
