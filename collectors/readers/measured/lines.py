"""Which lines of one file are kept as measurements, and as what.

In: Lines of a log in order. Out: rows of the table `measurements`: a line with labelled values, a
heading that begins a section ("== run B: dp 8"), or a statement that a check printed ("equal on all
ranks"). Bounded: the first lines of a file, then headings, statements, what is not finite, and
some lines after each restart.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from collectors.readers.measured import objects, words
from collectors.readers.measured.tables import RULE, TITLE, Tables
from collectors.readers.quote import clean

if TYPE_CHECKING:
    from collectors.readers.logs.prefix import Line

LINES = 5_000
"""Lines with values that are kept of one file from its begin, and then after each restart."""
_AFTER = 500
"""Lines that are kept after a heading or a restart further down."""
_TEXT = 2048
_FIRST = 6
"""First lines of a file, kept in any case: they say what its numbers are of."""
_HEADING = re.compile(
    r"^\W{0,3}(?:={2,}|-{2,}|#{1,}|\*{2,}|>{2,}|~{2,}|\[?(?:run|case|config|layout|setup)\b)",
    re.IGNORECASE,
)
_CHECKED = re.compile(
    r"\b(?:equal|identical|same|match(?:es|ed)?|mismatch\w*|differ(?:s|ent|ing)?|agree[sd]?|"
    r"disagree\w*|diverg\w+|unequal|pass(?:es|ed)?|fail(?:s|ed)?|restor\w+|resum\w+|"
    r"re-?start\w*|load(?:s|ed|ing)?|not found|set_epoch|sampler\w*|None|requires_grad)\b|!=",
    re.IGNORECASE,
)
_AGAIN = re.compile(r"(?i)\bre-?start|\bresum|checkpoint")
_UNFINITE = re.compile(r"\b(?:nan|inf)\b", re.IGNORECASE)
_SKIP = ("NCCL INFO", "Traceback (most", 'File "')
_CODE = (".py", ".sh", ".cu", ".cpp")


class Measurements:
    """Rows of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tables = Tables()
        self.kept = 0
        self.seen = 0
        self.until = 0
        """Lines to be kept in all, once a restart or a heading came late."""
        self.code = path.lower().removesuffix(".gz").endswith(_CODE)

    def feed(self, line: Line) -> dict[str, Any] | None:
        """The row of this line without its rank, None when it has nothing to keep."""
        text = line.text
        if (
            not text
            or line.pg
            or line.place
            or RULE.match(text)
            or any(skip in text for skip in _SKIP)
        ):
            return None
        if self.code:
            return self._bare(line, "code") if self.kept < LINES else None
        full = self.kept >= max(LINES, self.until)
        heading = _HEADING.match(text) is not None
        checked = _CHECKED.search(text) is not None
        if full and not (heading or checked or _UNFINITE.search(text)):
            return None
        said = self._read(text[:_TEXT], heading, checked)
        if full and (heading or _AGAIN.search(text)):
            self.until = self.kept + _AFTER
        title = said.head == TITLE
        self.seen += 1
        if title or (self.seen <= _FIRST and not (said.values or said.context)):
            return self._row(line, "title", words.Measured())
        if not (said.values or said.context or heading or checked):
            return None
        placed = "step" in said.context or "rank" in said.context
        begins = heading and not placed and (bool(said.context) or not said.values)
        return self._row(line, "heading" if begins else "checked" if checked else "values", said)

    def _read(self, text: str, heading: bool, checked: bool) -> words.Measured:
        known = objects.read(text) if text[:1] == "{" else None
        if known is not None:
            return known
        row = None if heading else self.tables.feed(text, prose=checked)
        if row is not None or not any(c.isdigit() for c in text):
            return row or (words.read(text) if _UNFINITE.search(text) else words.Measured())
        return words.read(text)

    def _bare(self, line: Line, kind: str) -> dict[str, Any]:
        return self._row(line, kind, words.Measured())

    def _row(self, line: Line, kind: str, said: words.Measured) -> dict[str, Any]:
        self.kept += 1
        fields = {"context": said.context, "values": said.values, "head": said.head}
        return {
            "locator": f"line {line.number}",
            "kind": kind,
            "fields": json.dumps(fields),
            "text": clean(line.text, _TEXT),
            "quote": clean(line.raw),
        }
