"""Memory that grows with every step: oom.retained-graph.

In: bytes of a rank at the same point of its steps, from progress lines or samples. Out: a finding
when they rise about linearly up to the failure. A few big jumps (longer sequences, first steps) are
no growth.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.words import size

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy


def series(evidence: Evidence, rank: int | None) -> list[tuple[int, int, dict[str, Any] | None]]:
    """(step, bytes, line) of what one rank's tensors held, from logs, else from samples."""
    best: dict[str, list[tuple[int, int, dict[str, Any] | None]]] = {}
    for row, fields in evidence.story.of("train.step"):
        if row["rank"] not in (None, rank):
            continue
        for name in ("allocated", "memory", "peak"):
            if isinstance(fields.get(name), int) and isinstance(fields.get("step"), int):
                best.setdefault(name, []).append((fields["step"], fields[name], row))
    for name in ("allocated", "memory", "peak"):
        if len(best.get(name, [])) >= 4:
            return best[name]
    samples = [
        (row["step"], row["allocated"], None)
        for row in evidence.collected.rows("memory")
        if row["rank"] == rank and row["step"] is not None and row["allocated"]
    ]
    last: dict[int, tuple[int, int, None]] = {s[0]: s for s in samples}  # one place of each step
    return [last[step] for step in sorted(last)]


def grows(values: list[int], policy: Policy) -> bool:
    """Whether values rise about linearly to the end: no jumps, no levelling, nearly always up."""
    if len(values) < policy.growth_points or values[0] <= 0:
        return False
    steps = [b - a for a, b in pairwise(values)]
    total = values[-1] - values[0]
    third = values[-1] - values[-1 - len(values) // 3]
    return (
        total >= policy.growth_share * values[0]
        and sum(s > 0 for s in steps) >= 0.7 * len(steps)
        and max(steps) <= max(0.25, 2.5 / len(steps)) * total
        and third >= 0.15 * total
    )


def growing(evidence: Evidence, policy: Policy, base: Finding, asked: str) -> Finding | None:
    """The finding when what the failing ranks hold grows with the steps."""
    found = {r: series(evidence, r) for r in base.ranks or (None,)}
    grown = {r: s for r, s in found.items() if grows([v for _, v, _ in s], policy)}
    if not grown or len(grown) * 2 < len(found):
        return None
    told = next(iter(grown.values()))
    (first_step, low, first_row), (last_step, high, last_row) = told[0], told[-1]
    slope = (high - low) / max(1, last_step - first_step)
    items = [logs.item(row) for row in (first_row, last_row) if row is not None]
    return base.but(
        cause="oom.retained-graph",
        confidence="likely",
        summary=f"{asked}; its memory rose from {size(low)} at step {first_step} to "
        f"{size(high)} at step {last_step}, step after step.",
        formula=f"({size(high)} - {size(low)}) / {last_step - first_step} steps = "
        f"{size(slope)} a step",
        evidence=(*base.evidence, *items),
        excluded=(
            ("oom.fragmentation", "what is allocated grows, not only what is reserved"),
            ("oom.activations", "the same work needs more with every step"),
        ),
    )
