"""One kind of log line: a pattern, and how its named groups become fields.

In: the bare text of a line. Out: fields, or None when the line is of another kind. The group's
name says how it is read: `i_x` integer, `f_x` number, `b_x` size such as "22.00 MiB" in bytes,
else text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collectors.readers.quote import clean

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS = {"bytes": 1, "byte": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"b": 1, "kb": 1024, "mb": 2**20, "gb": 2**30, "tb": 2**40}
_SIZE = re.compile(r"([\d.]+)\s*([A-Za-z]+)")
SIZE = r"[\d.]+ ?(?:bytes|[KMGT]i?B)"
"""A size as torch's allocator prints it."""


def size(text: str) -> int | None:
    """Bytes of "22.00 MiB"; None when it is no size."""
    found = _SIZE.match(text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    value = number(found.group(1)) if found else None
    return None if unit is None or value is None else round(value * unit)


def number(text: str) -> float | None:
    """A finite or infinite number, thousands separated by commas allowed; None otherwise."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def whole(text: str) -> int | None:
    """An integer of at most 64 bits; None otherwise."""
    digits = text.replace(",", "")
    if len(digits) > 20:
        return None
    value = int(digits)
    return value if -(2**63) <= value < 2**64 else None


def fields_of(found: re.Match[str]) -> dict[str, Any]:
    """The named groups of a match, read as their names say; those that did not match are absent."""
    out: dict[str, Any] = {}
    for name, text in found.groupdict().items():
        if text is None:
            continue
        if name.startswith("i_"):
            out[name[2:]] = whole(text)
        elif name.startswith("f_"):
            out[name[2:]] = number(text)
        elif name.startswith("b_"):
            out[name[2:]] = size(text)
        else:
            out[name] = clean(text, 300)
    return out


@dataclass(frozen=True)
class Rule:
    """A kind of line."""

    kind: str
    needle: str
    """Literal text that every such line holds; found far faster than the pattern."""
    pattern: re.Pattern[str]
    more: Callable[[str, dict[str, Any]], None] | None = None
    """Adds fields that one pattern cannot hold."""

    def fields(self, text: str) -> dict[str, Any] | None:
        """Fields of `text` when it is of this kind."""
        if self.needle not in text:
            return None
        found = self.pattern.search(text)
        if not found:
            return None
        out = fields_of(found)
        if self.more is not None:
            self.more(text, out)
        return out


def rule(
    kind: str,
    needle: str,
    pattern: str,
    more: Callable[[str, dict[str, Any]], None] | None = None,
) -> Rule:
    """A Rule from a pattern's text."""
    return Rule(kind, needle, re.compile(pattern), more)
