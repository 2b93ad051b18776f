"""Recognised log lines by kind, read once: what rules over logs share.

In: Collected. Out: Events with their fields; a kind that nobody wrote is an empty list. Where a
line has no host, its place is the file: lines of one file come from one machine.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from playbooks import logs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from collectors.collected import Collected
    from playbooks.finding import Item


_TIME_OF_DAY = re.compile(r"(?<![\d:])(\d{1,2}):([0-5]\d):([0-5]\d(?:[.,]\d{1,6})?)(?![\d:])")
_PASSED = re.compile(r"\[(?:(\d{1,4}):)?(\d{1,2}):(\d{2})<")


@dataclass(frozen=True)
class Event:
    """One line."""

    kind: str
    fields: dict[str, Any]
    row: dict[str, Any]

    @property
    def rank(self) -> int | None:
        """Whose line it is, or whom it names."""
        named = self.fields.get("rank")
        return self.row["rank"] if self.row["rank"] is not None else named

    @property
    def at_ns(self) -> int | None:
        """When."""
        at: int | None = self.row["time_ns"]
        return at

    @property
    def clock_s(self) -> float | None:
        """When, in seconds from any begin: its time, the time of day that stands in it, or the time
        that tqdm says has passed. Only differences between lines of one writer mean something."""
        if self.at_ns is not None:
            return self.at_ns / 1e9
        quote = self.row["quote"] or ""
        found = _TIME_OF_DAY.search(quote[:60]) or _PASSED.search(quote)
        if found is None:
            return None
        hours, minutes, seconds = (float((g or "0").replace(",", ".")) for g in found.groups())
        return 3600 * hours + 60 * minutes + seconds

    @property
    def host(self) -> str | None:
        """The machine, where the line or its file says."""
        named = self.fields.get("host")
        found: str | None = named or self.row["host"]
        return found

    @property
    def place(self) -> str:
        """The machine, else the file."""
        return self.host or self.row["source"] or "log"

    @property
    def label(self) -> str:
        """The place as a sentence names it."""
        return self.host or PurePath(self.row["source"] or "log").name

    @property
    def item(self) -> Item:
        """The line as evidence."""
        return logs.item(self.row)

    def number(self, name: str) -> float | None:
        """A numeric field, None when it is absent."""
        value = self.fields.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if good else None  # type: ignore[arg-type]  # checked above

    def text(self, name: str) -> str:
        """A text field, "" when it is absent."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""


class Lines:
    """All lines of a pile."""

    def __init__(self, collected: Collected) -> None:
        self.collected = collected

    @cached_property
    def _rows(self) -> dict[str, list[dict[str, Any]]]:
        out: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.collected.rows("log_events"):
            out[row["kind"] or ""].append(row)
        return out

    @cached_property
    def _events(self) -> dict[str, list[Event]]:
        return {}

    def of(self, *kinds: str) -> list[Event]:
        """Events of these kinds, kind after kind, in the order of files and lines."""
        out: list[Event] = []
        for kind in kinds:
            if kind not in self._events:
                self._events[kind] = [_event(kind, row) for row in self._rows.get(kind, ())]
            out += self._events[kind]
        return out

    def has(self, *prefixes: str) -> bool:
        """Whether any line is of a kind that begins so."""
        return any(kind.startswith(prefixes) for kind in self._rows)


def _event(kind: str, row: dict[str, Any]) -> Event:
    try:
        fields = json.loads(row["fields"] or "{}")
    except ValueError:
        fields = {}
    return Event(kind, fields if isinstance(fields, dict) else {}, row)


def items(events: Iterable[Event], most: int = 4) -> tuple[Item, ...]:
    """The first few lines as evidence, a quote once."""
    out: dict[str, Item] = {}
    for event in events:
        out.setdefault(event.item.quote, event.item)
        if len(out) >= most:
            break
    return tuple(out.values())
