"""A balancing loss whose gradient does not arrive: numeric.aux-loss-dead.

In: gradients of the router in one run, or in two runs with different coefficients. Out: at most one
finding: a gradient that is 0, or that the coefficient does not change.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import TYPE_CHECKING

from playbooks.measures.runs import Run, fit
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.measures.values import Row, Value
    from playbooks.policy import Policy


def rule(evidence: Evidence, _: Policy) -> list[Finding]:
    """Two coefficients first: that test needs no word for the gradient's part."""
    pairs = list(combinations(evidence.measures.runs[:40], 2))
    rows = evidence.measures.rows
    return _dead_auxiliary(pairs) or _no_gradient(rows) or _without(rows)


def _no_gradient(rows: Sequence[Row]) -> list[Finding]:
    """A router's gradient that is 0 at every step, while the balancing loss is not."""
    zero: list[Value] = []
    moved = False
    auxiliary: list[Value] = []
    for row in rows:
        for value in row.values:
            one = value.number
            if one is None or len(value.texts) > 1:
                continue
            gate = re.search(r"(?i)router|gate\b", f"{value.name} {value.label}") is not None
            if gate and re.search(r"(?i)grad", value.label):
                zero += [value] if one == 0 else []
                moved = moved or one != 0
            elif value.quantity == "auxiliary" and one > 0 and "coef" not in value.label:
                auxiliary.append(value)
    if moved or len(zero) < 3 or len(auxiliary) < 3:
        return []
    return [
        root(
            "numeric.aux-loss-dead",
            "likely",
            f"The balancing loss is {auxiliary[-1].texts[0]}, and the router's gradient from it "
            f"({zero[0].label}) is 0 in all {count(len(zero), 'report')}.",
            [],
            more=[zero[0].row.item, zero[-1].row.item],
            excluded=(
                ("numeric.router-collapse", "a balancing loss is configured and printed"),
                ("slow.expert-imbalance", "the gradient that would balance is missing"),
                ("numeric.reported-loss", "the gradient, not only the printed loss, lacks it"),
            ),
            formula=f"{zero[0].label} = 0 at auxiliary loss {auxiliary[-1].texts[0]}",
        )
    ]


def _dead_auxiliary(pairs: Sequence[tuple[Run, Run]]) -> list[Finding]:
    """Two coefficients, the same router gradient and the same loss."""
    for one, other in pairs:
        a, b = one.settings.get("coefficient"), other.settings.get("coefficient")
        if not a or not b or max(a, b) < 2 * min(a, b):
            continue
        fits = [
            (n, f)
            for q, n in one.series
            if q == "gradient" and (f := fit(one, other, q, n)) is not None
        ]
        router = [(n, f) for n, f in fits if "router" in n or "gate" in n] or fits
        losses = [f for q, n in one.series if q == "loss" and (f := fit(one, other, q, n))]
        moved = [f for _, f in router if abs(f.ratio - 1) > 1e-4 or f.spread > 1e-3]
        judged = router or [("loss", f) for f in losses if f.points >= 4]
        apart = not router and any(abs(f.ratio - 1) > 1e-4 for f in losses)
        if moved or not judged or apart:
            continue
        name, same = judged[0]
        return [
            root(
                "numeric.aux-loss-dead",
                "likely",
                f"With the balancing coefficient at {b:g} instead of {a:g} the "
                f"{'gradient of ' if name != 'loss' else ''}{name or 'router'} stays the same "
                f"({same.first[0].text} and {same.first[1].text}, over "
                f"{count(same.points, 'step')}): the loss does not reach the router.",
                [],
                more=[same.first[0].item, same.first[1].item],
                excluded=(
                    ("numeric.router-collapse", "balancing is configured"),
                    ("slow.expert-imbalance", "the coefficient has no effect at all"),
                    ("numeric.reported-loss", "the gradient, not only the printed loss, lacks it"),
                ),
                formula=f"gradient ratio {same.ratio:.6g} at coefficient ratio {b / a:g}",
            )
        ]
    return []


def _without(rows: Sequence[Row]) -> list[Finding]:
    """The router's gradient with and without the balancing loss, side by side and always equal."""
    told: list[tuple[Value, Value]] = []
    for row in rows:
        pair = [v for v in row.values if re.search(r"(?i)router|gate\b", f"{v.name} {v.label}")]
        pair = [v for v in pair if re.search(r"(?i)grad", v.label) and v.number is not None]
        off = next((v for v in pair if re.search(r"(?i)\bwithout|\bno\b|\boff\b", v.label)), None)
        on = next((v for v in pair if v is not off), None)
        if off is not None and on is not None and re.search(r"(?i)aux|balanc", row.text):
            told.append((on, off))
    if len(told) < 3 or any(on.texts != off.texts for on, off in told):
        return []
    on, off = told[0]
    return [
        root(
            "numeric.aux-loss-dead",
            "likely",
            f"The router's gradient is {on.texts[0]} with the balancing loss and {off.texts[0]} "
            f"without it, and equal in all {count(len(told), 'report')}.",
            [],
            more=[on.row.item, told[-1][0].row.item],
            excluded=(
                ("numeric.router-collapse", "a balancing loss is configured and printed"),
                ("slow.expert-imbalance", "the gradient that would balance is missing"),
                ("numeric.reported-loss", "the gradient, not only the printed loss, lacks it"),
            ),
            formula=f"{on.texts[0]} - {off.texts[0]} = 0 in {count(len(told), 'report')}",
        )
    ]
