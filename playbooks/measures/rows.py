"""Rows of `measurements` in order, with the section they stand in and what it fixes.

In: Collected. Out: Rows and their Values. A section is a file, or what follows a heading in it;
sizes that a file's begin or a heading names (dp 8, accumulation 4) hold for its rows.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from playbooks.finding import Item
from playbooks.measures import values
from playbooks.measures.values import Row, number

if TYPE_CHECKING:
    from collectors.collected import Collected

SETTINGS = (
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "world",
    "dp_size",
    "tp_size",
    "pp_size",
    "cp_size",
    "ep_size",
    "accumulation",
    "micro_batch",
    "global_batch",
    "coefficient",
    "seed",
)
"""Context that describes a run."""
_PLACES = ("rank", "step", "epoch")
_PROLOGUE = 3
_RESTART = re.compile(
    r"(?i)\bre-?start|\bresum|loading (?:the )?checkpoint|loaded checkpoint|checkpoint loaded|"
    r"restored|checkpoint\b.{0,40}\b(?:loaded|found)|"
    r"load(?:ed|ing)? .{0,40}(?:checkpoint|ckpt)|maintenance"
)


def read(collected: Collected) -> list[Row]:
    """All rows, file after file."""
    if "measurements" not in collected.tables or not collected.tables["measurements"].num_rows:
        return []
    files: dict[str, list[dict[str, Any]]] = {}
    for raw in collected.rows("measurements"):
        files.setdefault(raw["source"] or "", []).append(raw)
    out: list[Row] = []
    section = 0
    for source, raws in files.items():
        file = _File(source, section)
        out.extend(file.rows(raws))
        section = file.section + 1
    return out


class _File:
    """Goes through the rows of one file."""

    def __init__(self, source: str, section: int) -> None:
        self.source = source
        self.section = section
        self.fixed: dict[str, float] = {}
        self.own: dict[str, float] = {}
        self.prologue: list[str] = []
        self.name = re.sub(r"[_.-]", " ", source.rsplit("/", 1)[-1])[:80]
        self.heading = ""
        self.title = ""
        self.attempt = 0
        self.since = 0
        self.lead: Row | None = None
        self.measured = False

    def rows(self, raws: list[dict[str, Any]]) -> list[Row]:
        out = []
        for raw in raws:
            fields = _fields(raw["fields"])
            row = self._row(raw, fields)
            self._inherit(row, bool(fields["values"]))
            self._follow(row, bool(fields["values"]))
            row.section, row.attempt, row.since = self.section, self.attempt, self.since
            row.settings = {**self.fixed, **self.own, **_settings(row)}
            row.about = " / ".join(
                [row.lead, self.title, self.heading, *self.prologue, self.name]
            ).strip(" /")
            row.values = values.of_row(row, fields["values"])
            out.append(row)
        return out

    def _inherit(self, row: Row, has_values: bool) -> None:
        """A line of place alone leads those below that have none of their own."""
        own = {key for key in _PLACES if key in row.context}
        lead = {} if self.lead is None else self.lead.context
        if own and not has_values:
            self.lead = row
        elif own & lead.keys():
            self.lead = None
        elif self.lead is not None and row.kind != "heading":
            told = {k: v for k, v in lead.items() if k in _PLACES}
            row.context = {**told, **row.context}
            row.rank = self.lead.rank if row.rank is None else row.rank
            row.lead = self.lead.text[:200]

    def _row(self, raw: dict[str, Any], fields: dict[str, Any]) -> Row:
        digits = re.sub(r"\D", "", raw["locator"] or "")
        item = Item(raw["source"] or "log", raw["locator"] or "", (raw["quote"] or "")[:300])
        rank = raw["rank"]
        context = {str(k): str(v) for k, v in fields["context"].items()}
        if rank is None and context.get("rank", "").isdecimal():
            rank = int(context["rank"])
        text = raw["text"] or ""
        return Row(self.source, int(digits or 0), 0, raw["kind"] or "", rank, context, text, item)

    def _follow(self, row: Row, has_values: bool) -> None:
        """What this row begins: another section, another attempt, or the file's settings."""
        told = _settings(row)
        if _RESTART.search(row.text) and row.kind in ("heading", "checked", "title"):
            self.attempt += 1
            self.since = row.line
            return
        placed = row.rank is not None or row.at("step", "epoch") is not None
        if row.kind == "title" and (self.measured or len(self.prologue) >= _PROLOGUE):
            self.title = row.text[:300]
            return
        if (row.kind == "heading" or _titles(row, told, has_values)) and not placed:
            self.section += 1
            self.own, self.heading = told, row.text[:300]
            return
        if not self.measured and not placed and row.kind != "code":
            self.fixed.update({k: v for k, v in told.items() if k not in self.fixed})
            if len(self.prologue) < _PROLOGUE:
                self.prologue.append(row.text[:300])
        if has_values and (placed or len(self.prologue) >= _PROLOGUE):
            self.measured = True
        elif not placed and told and row.kind != "code" and not has_values:
            self.own.update({k: v for k, v in told.items() if k not in self.fixed})


def _titles(row: Row, told: dict[str, float], has_values: bool) -> bool:
    """A line of sizes that ends in a colon is a heading too."""
    short = row.kind == "title" and len(row.text.split()) < 9
    return (bool(told) or short) and row.text.rstrip().endswith(":") and not has_values


def _settings(row: Row) -> dict[str, float]:
    coordinates = row.rank is not None
    out = {}
    for key in SETTINGS:
        value = number(row.context[key]) if key in row.context else None
        if value is not None and not (coordinates and key in ("tp", "dp", "pp", "cp", "ep")):
            out[key.removesuffix("_size")] = value
    return out


def _fields(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = {}
    found = found if isinstance(found, dict) else {}
    context, values = found.get("context"), found.get("values")
    return {
        "context": context if isinstance(context, dict) else {},
        "values": values if isinstance(values, list) else [],
    }
