"""What the field knows, as data: the causes (taxonomy.yaml) and how errors read (errors.yaml).

Out: `causes()`, `cause(id)`, `nearest(text)`, `classify(type, message)`. Both files are read once,
with the safe loader. Code that asks for an id that does not exist gets KeyError: a misspelt cause
is a bug, never a new cause.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True)
class Cause:
    """One entry of the taxonomy."""

    id: str
    title: str
    decides: str
    """The least evidence that decides, with its look-alikes."""
    reasons: tuple[str, ...]
    """Sub-reasons (`where` or `why` of the taxonomy)."""
    cascade: tuple[str, ...]
    advice: tuple[str, ...]
    not_advice: tuple[str, ...]
    evidence: tuple[str, ...]

    def advice_for(self, where: str | None) -> tuple[str, ...]:
        """The advice with that of sub-reason `where` first and that of other reasons last."""

        def order(line: str) -> int:
            head = line.split(":", 1)[0] if ":" in line else ""
            named = {part.strip() for part in re.split(r",| and ", head)} & set(self.reasons)
            return 1 if not named else (0 if where in named else 2)

        if where is None:
            return self.advice
        return tuple(sorted(self.advice, key=order))

    def look_alikes(self) -> tuple[tuple[str, str], ...]:
        """(cause, the fact that tells it apart), as `decides` states them."""
        flat = re.sub(r"\n {2,}", " ", self.decides)
        return tuple(re.findall(r"^not ([a-z]+\.[a-z-]+): because (.*)$", flat, re.MULTILINE))


def _load(name: str) -> Any:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return yaml.safe_load(text)


@cache
def causes() -> dict[str, Cause]:
    """Every cause by its id, in the order of the file."""
    out: dict[str, Cause] = {}
    for raw in _load("taxonomy.yaml")["causes"]:
        out[raw["id"]] = Cause(
            id=raw["id"],
            title=raw["title"],
            decides=raw["decides"],
            reasons=tuple(raw.get("where") or raw.get("why") or ()),
            cascade=tuple(raw.get("cascade") or ()),
            advice=tuple(raw.get("advice") or ()),
            not_advice=tuple(raw.get("not_advice") or ()),
            evidence=tuple(raw.get("evidence") or ()),
        )
    return out


def cause(identifier: str) -> Cause:
    """The cause with that id; KeyError when there is none."""
    return causes()[identifier]


def nearest(text: str, most: int = 3) -> list[str]:
    """Ids that resemble `text`, best first; an id's last part or family alone is understood too."""
    ids = list(causes())
    low = text.lower()
    inside = [i for i in ids if low and (low in i or i.split(".")[1] in low)]
    return list(dict.fromkeys([*inside, *difflib.get_close_matches(low, ids, most, 0.4)]))[:most]


@dataclass(frozen=True)
class ErrorClass:
    """What kind of error a message is."""

    name: str
    """peer, timeout, launcher, interrupted, mismatch, memory, kernel, storage, program."""
    cause: str | None
    """The cause that such an error is by itself, None for effects and for what needs more."""


PROGRAM = ErrorClass("program", "crash.user-exception")
"""An exception that no pattern claims is the program's own."""


@cache
def _patterns() -> tuple[tuple[ErrorClass, re.Pattern[str]], ...]:
    out: list[tuple[ErrorClass, re.Pattern[str]]] = []
    for raw in _load("errors.yaml")["errors"]:
        kind = ErrorClass(raw["class"], raw.get("cause"))
        out.extend((kind, re.compile(pattern, re.IGNORECASE)) for pattern in raw["patterns"])
    return tuple(out)


def classify(text: str) -> ErrorClass:
    """The class of an error from its type and message; the first pattern that matches wins."""
    for kind, pattern in _patterns():
        if pattern.search(text):
            return kind
    return PROGRAM
