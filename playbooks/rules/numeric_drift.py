"""Distances between replicas' weights that a check printed: numeric.replicas-diverged.

In: "max diff over ranks" by step, in any wording. Out: at most one finding. The distance must be
far from rounding; a series that stays at 0 is sound.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.measures.values import Value

_WEIGHTS = re.compile(r"(?i)weight|param|\bw_|\|w|replica")
_BETWEEN = re.compile(
    r"(?i)\b(?:over|across|between|among) (?:all |the |dp )*(?:ranks|replicas|gpus)|"
    r"\bspread\b|rank ?0\b|\bw_0\b|replica"
)
_OTHER = re.compile(
    r"(?i)gradient|\bgrad|reference|one process|single|expected|tolerance|"
    r"after (?:the )?step|copy0|\bloss\b|\btp\b|shard"
)
_ROUNDING = 1e-7


def rule(evidence: Evidence) -> list[Finding]:
    """The first series of distances that leaves rounding and does not return."""
    if evidence.measures.layout.model_parallel:
        return []
    series: dict[tuple[str, str], list[Value]] = {}
    for row in evidence.measures.rows:
        for value in row.values:
            spread = value.quantity == "difference" or re.search(r"(?i)\bstd\b", value.label)
            words = f"{value.label} {row.about}"
            if not spread or value.number is None or len(value.texts) > 1:
                continue
            if _WEIGHTS.search(words) and _BETWEEN.search(words) and not _OTHER.search(value.label):
                series.setdefault((row.source, value.label), []).append(value)
    for (_, label), values in series.items():
        numbers = [abs(v.number or 0.0) for v in values]
        apart = [i for i, n in enumerate(numbers) if n > _ROUNDING]
        if len(apart) < 2 or numbers[-1] <= _ROUNDING or len(apart) < len(numbers) - apart[0]:
            continue
        begin, end = values[apart[0]], values[-1]
        before = f"0 until {_place(values[apart[0] - 1])}" if apart[0] else "never 0"
        return [
            root(
                "numeric.replicas-diverged",
                "likely",
                f"The distance between replicas ({label}) is {before}, {begin.texts[0]} at "
                f"{_place(begin)} and {end.texts[0]} at {_place(end)}, "
                f"in {count(len(apart), 'check')}.",
                [],
                more=[begin.row.item, end.row.item],
                where="unsynchronised-step" if apart[0] else "init",
                excluded=(
                    ("numeric.gradient-reduction", "the distance is over all weights"),
                    ("numeric.resume-state", "it did not begin at a restart"),
                    ("numeric.divergence", "replicas differ from each other"),
                ),
                formula=f"{label}: {begin.texts[0]} -> {end.texts[0]} (must be 0)",
            )
        ]
    return []


def _place(value: Value) -> str:
    step = value.row.at("step", "epoch")
    return f"step {step}" if step is not None else "the check"
