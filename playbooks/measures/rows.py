"""Rows of `measurements` in order, with the section they stand in and what it fixes.

In: Collected. Out: Rows and their Values. A section is a file, or what follows a heading in it;
sizes that a file's begin or a heading names (dp 8, accumulation 4) hold for its rows.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from playbooks.finding import Item
from playbooks.measures import quantities

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
    r"restored|load(?:ed|ing)? .{0,40}(?:checkpoint|ckpt)|maintenance"
)
_DISTANCE = re.compile(
    r"(?i)\b(?:max\w*|rel\w*|abs\w*|gradient|grad)\b[^/|]{0,24}\b(?:error|diff\w*|deviation)"
)
_NUMBER = re.compile(
    r"^[-+]?[\d.,]+(?:[eE][-+]?\d+)?[%x\u00d7]?$|^[-+]?(?:nan|inf|infinity)$", re.IGNORECASE
)


@dataclass(frozen=True)
class Value:
    """One label's values on one line."""

    row: Row
    label: str
    quantity: str
    name: str
    rest: str
    reference: bool
    texts: tuple[str, ...]
    rank: int | None
    axis: str = ""
    """Axis whose coordinate `rank` is, "" for a global rank."""

    @property
    def number(self) -> float | None:
        """The first value as a number."""
        return number(self.texts[0])

    @property
    def settings(self) -> dict[str, float]:
        """What holds for its run: of the line, the section, the file."""
        return self.row.settings


@dataclass
class Row:
    """One line."""

    source: str
    line: int
    section: int
    kind: str
    rank: int | None
    context: dict[str, str]
    text: str
    item: Item
    settings: dict[str, float] = field(default_factory=dict)
    about: str = ""
    """The heading and first lines of its section: what its numbers are of."""
    values: list[Value] = field(default_factory=list)
    lead: str = ""
    """The line of context above it ("rank 3, step 500:") whose context holds for it too."""
    since: int = 0
    """Line of the last restart before it, 0 for none."""
    attempt: int = 0
    """How many restarts its file told of before it."""

    def at(self, *keys: str) -> int | None:
        """The first of these context keys that the line has."""
        for key in keys:
            if key in self.context and self.context[key].isdecimal():
                return int(self.context[key])
        return None


def number(text: str) -> float | None:
    """A printed number; None for a digest or a missing value."""
    if not _NUMBER.match(text):
        return None
    plain = text.rstrip("%x\u00d7").replace(",", "")
    try:
        value = float(plain)
    except ValueError:
        return None
    return value / 100 if text.endswith("%") else value


def same(one: str, other: str) -> bool:
    """Whether two printed values are equal: to the character, or within their last digits."""
    if one == other:
        return True
    a, b = number(one), number(other)
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return False
    if re.fullmatch(r"\d+", one) and re.fullmatch(r"\d+", other):
        return False  # counts and digests of digits only
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


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
            row.about = " / ".join([self.title, self.heading, *self.prologue, self.name]).strip(
                " /"
            )
            row.values = _values(row, fields["values"])
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
    return bool(told) and row.text.rstrip().endswith(":") and not has_values


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


def _values(row: Row, told: list[Any]) -> list[Value]:
    out: list[Value] = []
    subject = ""
    for label, texts, rank in told:
        named = quantities.read(str(label))
        quantity, name = named.quantity, named.name
        if not quantity and not name and out and _only_variant(named.rest):
            quantity, name = out[-1].quantity, out[-1].name
        plain = str(label).lower() in ("value", "val", "y", "")
        if not quantity and not name and plain:
            quantity = quantities.mentioned(row.about)
        if not quantity and not name:
            quantity = _explained(str(label), row.about)
        if not quantity and name:
            mentioned = quantities.mentioned(row.about)
            if mentioned and len(texts) == 1 and _DISTANCE.search(row.about):
                mentioned = "difference"
            digest = number(str(texts[0])) is None and str(texts[0]) != "-"
            quantity = mentioned or ("weight" if digest else "")
        if not out and name and row.text.lstrip().startswith(name.split()[0]):
            subject = name
        out.append(
            Value(
                row,
                str(label),
                quantity,
                name or subject,
                named.rest,
                named.reference,
                tuple(str(t) for t in texts),
                *(_place(rank, row) if not named.reference else (row.rank, "")),
            )
        )
    return out


def _place(rank: object, row: Row) -> tuple[int | None, str]:
    found = re.fullmatch(r"([a-z]{0,4})(\d{1,9})", rank) if isinstance(rank, str) else None
    return (int(found.group(2)), found.group(1)) if found else (row.rank, "")


def _explained(label: str, about: str) -> str:
    """The quantity of a bare word that the heading explains: "printed" of "printed loss, ..."."""
    words = label.split()
    if not words or len(words) > 2 or not words[-1].isalpha():
        return ""
    found = re.search(rf"\b{re.escape(words[-1])}\s+([\w ]+?)\s*(?:[,;:)/]|$)", about)
    return quantities.read(found[1]).quantity if found else ""


def _only_variant(rest: str) -> bool:
    words = rest.split()
    return any(quantities.is_variant(w) for w in words)
