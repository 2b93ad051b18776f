"""The fp16 loss scale that falls to its floor: numeric.loss-scale-collapse.

In: overflow lines, loss scales by step in any wording. Out: at most one finding: overflow after
overflow down to the floor, without a rise between.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.rules.numeric_nan import bad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.measures.values import Value
    from playbooks.policy import Policy


def rule(evidence: Evidence, points: Sequence[Event], policy: Policy) -> list[Finding]:
    """From overflow lines and progress lines, else from any printed scale."""
    return _overflows(evidence, points, policy) or _falls(evidence, policy)


def _falls(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A printed scale whose last stretch only falls, often, to the floor."""
    by_source: dict[str, list[Value]] = {}
    for row in evidence.measures.rows:
        for value in row.values:
            single = value.number and len(value.texts) == 1 and value.rank in (None, 0)
            if value.quantity == "scale" and single:
                by_source.setdefault(row.source, []).append(value)
    for values in by_source.values():
        numbers = [v.number or 0.0 for v in values]
        begin = len(numbers) - 1
        while begin > 0 and numbers[begin - 1] >= numbers[begin]:
            begin -= 1
        run = numbers[begin:]
        halved = sum(a > b for a, b in pairwise(run))
        if halved < policy.overflows or run[-1] > policy.scale_floor:
            continue
        first = begin + next(i for i, n in enumerate(run) if n < run[0])
        return [
            root(
                "numeric.loss-scale-collapse",
                "likely",
                f"The loss scale falls {halved} times in a row, from {run[0]:g} to {run[-1]:g}, "
                "and never rises between: no step succeeds.",
                [],
                more=[values[first].row.item, values[-1].row.item],
                excluded=(
                    ("numeric.nan", "the scaler detects and skips, down to the floor"),
                    ("numeric.divergence", "fp16 scaling is what fails"),
                ),
                formula=f"{run[0]:g} -> {run[-1]:g} in {halved} reductions",
            )
        ]
    return []


def _overflows(evidence: Evidence, points: Sequence[Event], policy: Policy) -> list[Finding]:
    """Overflow after overflow, down to the floor, without a good step between."""
    overflows = evidence.lines.of("train.overflow")
    last_step = max((line(e) for e in evidence.lines.of("train.step")), default=(-1))
    run = [e for e in overflows if line(e) > last_step]
    scales = [s for e in run if (s := e.number("reduced") or e.number("scale")) is not None]
    if len(run) >= policy.overflows and scales and scales[-1] <= policy.scale_floor:
        return [
            root(
                "numeric.loss-scale-collapse",
                "likely",
                f"{len(run)} overflows in a row bring the loss scale to {scales[-1]:g}; no step "
                "succeeds between them.",
                [run[0], run[-1]],
                excluded=(
                    ("numeric.nan", "the scaler detects and skips, down to the floor"),
                    ("numeric.divergence", "fp16 scaling is what fails"),
                ),
            )
        ]
    told = [(s, e) for e in points if (s := e.number("loss_scale")) is not None]
    if len(told) < 8 or max(s for s, _ in told) < 1024 or told[-1][0] > policy.scale_floor:
        return []
    skipped = [e for _, e in told[-3:] if (e.number("skipped") or 0) > 0 or bad(e)]
    if not skipped:
        return []
    return [
        root(
            "numeric.loss-scale-collapse",
            "likely",
            f"The loss scale fell from {max(s for s, _ in told):g} to {told[-1][0]:g} and steps "
            "are still skipped.",
            [told[0][1], told[-1][1]],
            excluded=(("numeric.divergence", "fp16 scaling is what fails"),),
        )
    ]


def line(event: Event) -> int:
    """The number of its line in its file."""
    digits = "".join(c for c in event.item.locator if c.isdecimal())
    return int(digits[:12] or 0)
