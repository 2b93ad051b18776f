"""What a rule says: a Finding, with evidence that a reader can look up.

A rule is a pure function `(Evidence, Policy) -> list[Finding]`. `cause` is an id of
knowledge/taxonomy.yaml. `ranks` are culprits, never victims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["root", "effect", "context"]
Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True)
class Item:
    """One piece of evidence: where it stands and what it says."""

    source: str
    locator: str
    quote: str


@dataclass(frozen=True)
class Finding:
    """One cause, as far as the evidence carries it."""

    cause: str
    role: Role
    confidence: Confidence
    summary: str
    """One sentence with the numbers."""
    ranks: tuple[int, ...] = ()
    group: str | None = None
    """Such as "tp[4..7]"."""
    axis: str | None = None
    where: str | None = None
    """Sub-reason of the taxonomy (`where` or `why`), such as "data"."""
    evidence: tuple[Item, ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()
    """(look-alike cause, the fact that tells it apart)."""
    advice: tuple[str, ...] = ()
    """Most likely cure first; filled from the taxonomy where a rule gives none."""
    formula: str | None = None
    at_ns: int | None = None
    """When the cause set in, for ordering by time."""
    caused_by: str | None = None
    """Cause of the root that explains this effect."""

    def but(self, **changes: object) -> Finding:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # checked by the dataclass


@dataclass(frozen=True)
class Abstention:
    """What is known, what is not, and which artifact would decide."""

    because: str
    need: tuple[str, ...]
