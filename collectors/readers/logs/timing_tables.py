"""Tables of measurements: a header of names, then rows of numbers, in whatever is first column.

In: bare lines. Out: records as timings.Scanner yields them. Three shapes are known:

    rank   fwd_ms  bwd_ms        phase      rank 0  rank 1        Action     | Mean (s) | Total (s)
       0   310.2   640.1         forward     310     312          optimizer  | 0.05     | 12.1

Cells are split at |, commas, tabs, two spaces, or one space, whichever gives as many as the header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collectors.readers.logs import quantities
from collectors.readers.logs.rule import number
from collectors.readers.logs.timing_numbers import UNIT_IN, entry

if TYPE_CHECKING:
    from collectors.readers.logs.timings import Scanner

_CELLS = 48
_WHO = re.compile(
    r"^(?:global[ _]?)?(rank|stage|[ec]p(?:[ _]rank)?|pp(?:[ _]rank)?|host|node|gpu|"
    r"expert|device|layer|"
    r"step|iter(?:ation)?|it|micro[ _-]?batch|mb)s?(?: ?(?:id|idx|index|#))?$",
    re.IGNORECASE,
)
_NAMES = {"ep rank": "ep", "ep_rank": "ep", "pp": "stage", "pp rank": "stage", "pp_rank": "stage"}
_NAMES |= {
    "cp rank": "cp",
    "cp_rank": "cp",
    "node": "host",
    "device": "gpu",
    "iter": "step",
    "iteration": "step",
    "it": "step",
}
_COLUMN = re.compile(r"^(rank|stage|host|gpu|ep)[ _#]?(\d{1,6})$|^r(\d{1,6})$", re.IGNORECASE)
_LABEL = re.compile(
    r"^(?:name|action|phase|op|operation|kernel|section|timer|region|what|part)s?$", re.IGNORECASE
)
_CELL = re.compile(r"^[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?\s?(%|[nuµm]?s|MHz|W|C|x)?$")
_SPAN = re.compile(r"^(\d{1,7})(?:-|\.\.+)(\d{1,7})$")
_RULER = re.compile(r"^[\s|+=:─-]+$")
_SPLITS = (
    re.compile(r"\s*\|\s*"),
    re.compile(r"\s*,\s*"),
    re.compile(r"\t+|\s{2,}"),
    re.compile(r"\s+"),
)


def _split(text: str) -> list[list[str]]:
    """The cells of a line, one reading for each separator that it has."""
    bare = text.strip().strip("|").strip()
    out = []
    for pattern in _SPLITS:
        cells = [c.strip() for c in pattern.split(bare)]
        if 1 < len(cells) <= _CELLS and cells not in out:
            out.append(cells)
    return out


@dataclass
class Tables:
    """The table that a file is in, if any."""

    scanner: Scanner
    headers: list[list[str]] = field(default_factory=list)
    since: int = 0

    def feed(self, text: str) -> dict[str, Any] | None:
        """The record of a row."""
        if not text or _RULER.match(text):
            self.since += not text
            return None
        head = self._header(text)
        if head:
            self.headers, self.since = head, 0
            return None
        if not self.headers:
            return None
        row = self._row(text)
        if row is None:
            self.since += 1
            if self.since > 3:
                self.headers = []
        else:
            self.since = 0
        return row

    def inside(self, text: str) -> bool:
        """Whether a line belongs to a table: its numbers are no sentence."""
        return bool(self.headers) and bool(self._match(text))

    def _header(self, text: str) -> list[list[str]]:
        if len(text) > 600 or "=" in text:
            return []
        found = []
        for cells in _split(text.lstrip("# ")):
            if any(_CELL.match(c) for c in cells) or max(map(len, cells)) > 40:
                continue
            who = _WHO.match(cells[0]) or _LABEL.match(cells[0])
            known = sum(_known(c) for c in cells[1:])
            columns = sum(bool(_COLUMN.match(c)) for c in cells[1:])
            if (who and known + columns >= 1) or columns >= 2:
                found.append(cells)
        return found

    def _match(self, text: str) -> tuple[list[str], list[str]] | None:
        for cells in _split(text):
            for head in self.headers:
                if len(head) != len(cells):
                    continue
                if sum(bool(_CELL.match(c)) for c in cells[1:]) * 2 >= len(cells) - 1:
                    return head, cells
        return None

    def _row(self, text: str) -> dict[str, Any] | None:
        found = self._match(text)
        if found is None:
            return None
        head, cells = found
        if any(_COLUMN.match(c) for c in head[1:]):
            return self._across(head, cells)
        who: dict[str, Any] = {}
        step = None
        values = []
        label = _LABEL.match(head[0])
        for name, cell in zip(head, cells, strict=True):
            key = _WHO.match(name)
            if key:
                step = _place(key[1].lower(), cell, who, step)
            elif not label:
                one = self._cell(name, cell)
                values += [one] if one else []
        if label:
            values = self._labelled(head, cells)
        return self.scanner.told(who, step, values, {}) if values else None

    def _cell(self, name: str, cell: str) -> list[Any] | None:
        found = _CELL.match(cell)
        if not found:
            return None
        unit = found[1]
        digits = cell[: len(cell) - len(unit or "")].strip()
        default = self.scanner.context.unit
        one = entry(name, digits, unit, default)
        if one is None and not unit:
            told = quantities.classify(name, "time")  # a column of phases needs no unit
            value = number(digits)
            one = [told, value, "", name] if told and value is not None else None
        return one

    def _labelled(self, head: list[str], cells: list[str]) -> list[list[Any]]:
        """A row whose first cell is the phase: the first column of times is its value."""
        for name, cell in zip(head[1:], cells[1:], strict=True):
            low = name.lower()
            if "%" in name or "call" in low or "#" in name or "count" in low or "perc" in low:
                continue
            found = _CELL.match(cell)
            if not found:
                continue
            told = UNIT_IN.search(name)
            unit = found[1] or (told[1] if told else None) or self.scanner.context.unit or "ms"
            digits = cell[: len(cell) - len(found[1] or "")].strip()
            one = entry(cells[0], digits, unit, None)
            return [one, *_part(one[0], head, cells)] if one else []
        return []

    def _across(self, head: list[str], cells: list[str]) -> dict[str, Any] | None:
        """A row of one phase over ranks or stages in columns: a list by that axis."""
        told = quantities.classify(cells[0], "time") or quantities.classify(cells[0], "")
        numbers = []
        axis = ""
        for name, cell in zip(head[1:], cells[1:], strict=True):
            column, value = _COLUMN.match(name), _CELL.match(cell)
            if column and value:
                axis = (column[1] or "rank").lower()
                digits = cell[: len(cell) - len(value[1] or "")].strip()
                numbers.append(number(digits) or 0.0)
        if told is None or len(numbers) < 2:
            return None
        return self.scanner.told({}, None, [], {f"{told}/{axis}": numbers})


def _part(quantity: str, head: list[str], cells: list[str]) -> list[list[Any]]:
    """The share of a row, where the table has a column of percents."""
    for name, cell in zip(head[1:], cells[1:], strict=True):
        found = _CELL.match(cell)
        if found and ("%" in name or found[1] == "%"):
            value = number(cell.rstrip("% "))
            return [] if value is None else [[quantity, value / 100, "share", cells[0][:60]]]
    return []


def _known(name: str) -> bool:
    return bool(
        quantities.classify(name, "time")
        or quantities.classify(name, "")
        or re.search(r"\bMHz\b|clock|\bmean\b|\btotal\b|\bavg\b|\bms\b", name, re.IGNORECASE)
    )


def _place(key: str, cell: str, who: dict[str, Any], step: int | None) -> int | None:
    """Fills whom a row is about; returns its step."""
    name = _NAMES.get(key, key)
    if name == "host":
        who["host"] = cell[:60]
    elif name == "rank" and (span := _SPAN.match(cell)):
        who["ranks"] = [int(span[1]), int(span[2])]
    elif cell.isdecimal() and len(cell) < 13:
        if name == "step":
            return int(cell)
        if name in ("rank", "stage", "ep", "cp", "gpu", "expert", "layer"):
            who[name] = int(cell)
    return step
