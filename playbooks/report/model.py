"""The report as data: exactly what `diag.report/1` holds, and nothing of how it looks.

In: findings of the engine, metrics, coverage. Out: `Report.as_json()`, a plain mapping.
Exactly one of `verdict`, `abstained`, `health` is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectors.collected import Source
    from playbooks.finding import Abstention, Finding

SCHEMA = "diag.report/1"


@dataclass(frozen=True)
class Health:
    """A job with nothing wrong in what was seen."""

    summary: str
    numbers: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Coverage:
    """Which ranks and files the answer stands on."""

    world_size: int | None
    ranks_seen: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Report:
    """One answer."""

    verdict: Finding | None
    findings: tuple[Finding, ...]
    """Every root, effect and context, the verdict included."""
    abstained: Abstention | None
    health: Health | None
    metrics: dict[str, Any] = field(hash=False)
    coverage: Coverage
    titles: dict[str, str] = field(hash=False)
    """Title of every cause that is mentioned."""

    def __post_init__(self) -> None:
        answers = [a for a in (self.verdict, self.abstained, self.health) if a is not None]
        if len(answers) != 1:
            raise ValueError("a report has exactly one of verdict, abstained, health")

    def _finding(self, one: Finding) -> dict[str, Any]:
        return {
            "cause": one.cause,
            "title": self.titles.get(one.cause, one.cause),
            "confidence": one.confidence,
            "ranks": list(one.ranks),
            "group": one.group,
            "axis": one.axis,
            "where": one.where,
            "summary": one.summary,
            "evidence": [
                {"source": i.source, "locator": i.locator, "quote": i.quote} for i in one.evidence
            ],
            "excluded": [{"cause": c, "because": b} for c, b in one.excluded],
            "advice": list(one.advice),
            "formula": one.formula,
        }

    def as_json(self) -> dict[str, Any]:
        """The mapping of schema `diag.report/1`."""
        return {
            "schema": SCHEMA,
            "verdict": None if self.verdict is None else self._finding(self.verdict),
            "findings": [
                {**self._finding(f), "role": f.role, "caused_by": f.caused_by}
                for f in self.findings
            ],
            "abstained": None
            if self.abstained is None
            else {"because": self.abstained.because, "need": list(self.abstained.need)},
            "health": None
            if self.health is None
            else {"summary": self.health.summary, "numbers": self.health.numbers},
            "metrics": self.metrics,
            "coverage": {
                "world_size": self.coverage.world_size,
                "ranks_seen": list(self.coverage.ranks_seen),
                "missing_ranks": list(self.coverage.missing_ranks),
                "sources": [
                    {
                        "path": s.path,
                        "kind": s.kind,
                        "read": s.read,
                        "problems": list(s.problems),
                    }
                    for s in self.coverage.sources
                ],
            },
        }
