"""One printed line and the values on it, as rules see them.

In: fields of a row of `measurements`. Out: Rows and Values; numbers and equality of printed values.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from playbooks.measures import quantities

if TYPE_CHECKING:
    from playbooks.finding import Item

_DISTANCE = re.compile(
    r"(?i)\|\w+ - \w+\||"
    r"\b(?:max\w*|rel\w*|abs\w*|gradient|grad)\b[^/|]{0,24}\b(?:error|diff\w*|deviation)"
)
_PRINTED = re.compile(r"(?i)^(?:logged|printed|reported|shown)$")
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


@lru_cache(maxsize=1 << 16)
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


def of_row(row: Row, told: list[Any]) -> list[Value]:
    """The values of a line, with quantities that the line, its heading or its file tells."""
    out: list[Value] = []
    subject = ""
    for label, texts, rank in told:
        named = _named(str(label))
        quantity, name = named.quantity, named.name
        if not quantity and _PRINTED.match(str(label)):
            others = (quantities.read(str(other[0])).quantity for other in told)
            quantity = "loss" if "loss" in others else ""
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


def _named(label: str) -> quantities.Named:
    """What a label says; in a table the row says of what, the column what, or which run."""
    subject, mark, column = label.partition(" ::")
    if not mark:
        return quantities.read(label)
    of, what = quantities.read(subject), quantities.read(column.strip())
    name = of.name or ("" if of.quantity else subject.strip())
    return quantities.Named(what.quantity or of.quantity, name or what.name, what.rest)


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
