"""One number of a line: its name, its unit, what it measures.

In: the text before and behind a number. Out: [quantity, number, unit, name] with times in seconds
and shares from 0 to 1; None for a number that quantities.py does not know.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs import quantities
from collectors.readers.logs.rule import number

UNIT_IN = re.compile(r"[(\[](ms|us|µs|s|sec|seconds|%|MHz|W)[)\]]")
_SUFFIX = re.compile(r"_(ms|us|sec|secs|seconds|s|mhz|pctg?|w|c)$|\b(ms)$")
_PARENTHESES = re.compile(r"\([^()\d]{0,40}\)")
_CUT = re.compile(r"[,;|(){}\[\]\n]|\s-\s|  \s*(?=\S)")


def unit_of(name: str, unit: str | None, default: str | None) -> tuple[float, str]:
    """(factor, unit class) of a number with that unit behind it, or told by its name."""
    found = (unit or "").strip()
    if not found:
        told = UNIT_IN.search(name) or _SUFFIX.search(name.strip().lower().rstrip("\"':= "))
        found = next((g for g in told.groups() if g), "") if told else ""
    found = "%" if found.startswith("pct") else found
    low = found.lower()
    if low in quantities.TIMES:
        return quantities.TIMES[low], "s"
    if low in quantities.UNITS:
        return (0.01 if low in ("%", "percent") else 1.0), quantities.UNITS[low]
    if low in ("k", "b", "g") or found == "M":
        return {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}[low], ""
    if default in quantities.TIMES:
        return quantities.TIMES[default], "default"
    return 1.0, ""


def quantity(name: str, kind: str) -> str | None:
    """The quantity; a default unit counts only for what is a time."""
    if kind == "default":
        return quantities.classify(name, "") or quantities.classify(name, "time")
    return quantities.classify(name, "time" if kind == "s" else kind)


_COUNTS = ("tokens", "sumsq", "length", "samples", "last", "reductions", "buckets")
_COUNTED = frozenset((*_COUNTS, "entropy", "imbalance"))


BARE = re.compile(r"\b(?:data|fwd|bwd|forward|backward|optim\w*|opt)\b", re.IGNORECASE)
"""Words of a line of phases: beside them, a number with a decimal point may be a time as well."""


def entry(
    name: str, text: str, unit: str | None, default: str | None, *, bare: bool = False
) -> list[Any] | None:
    """[quantity, number, unit, name] of one number; None where it is not known."""
    value = number(text)
    if value is None or not abs(value) < 1e18:
        return None
    factor, kind = unit_of(name, unit, default)
    found = quantity(name, kind)
    if found is None and bare and not kind and "." in text:
        found = quantities.classify(name, "time")
    if found is None:
        return None
    if kind == "default":
        factor, kind = (1.0, "") if found in _COUNTED else (factor, "s")
    return [found, value * factor, kind, quantities.plain(name)[:60]]


def named(
    between: str, behind: str, digits: str, unit: str | None, default: str | None, *, bare: bool
) -> list[Any] | None:
    """The number with the name before it, else with the one behind it."""
    inside = UNIT_IN.search(between)
    unit = unit or (f" {inside[1]}" if inside else None)
    name = _PARENTHESES.sub(" ", between)
    name = _CUT.split(name.rstrip(" ([{<~=:\"'").rstrip())[-1].strip(" ,;|.\t")
    if name.strip("\x00 ") == "" and "\x00" in between:
        name = "step" if unit and "\x00" in between else ""
    name = name.replace("\x00", " ").strip()
    if name and any(c.isalpha() for c in name):
        told = entry(name, digits, unit, default, bare=bare)
        if told is not None or unit:
            return told
    after = re.match(
        r"\s*(?:of |in |for |spent in |waiting for |on )?([A-Za-z][^,;|(){}\[\]\d]{0,50})", behind
    )
    if after is None or (after.end() < len(behind) and behind[after.end()].isdigit()):
        return None
    if re.search(r"[=:]\s*$", after[1]):
        return None
    told = entry(after[1].strip(), digits, unit, default)
    return told if told and (unit or told[0] in ("reductions", "buckets")) else None
