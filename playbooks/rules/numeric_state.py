"""Settings that jump at a restart, and lines that say what was not loaded: numeric.resume-state.

In: rows with learning rates, loss scales and losses before and after a restart. Out: at most one
finding; a jump counts only where the loss leaves its level there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from playbooks.measures.values import number
from playbooks.rules.naming import root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.measures.values import Row
    from playbooks.policy import Policy

_LOST = re.compile(
    r"(?i)(?:optim\w*|adam|scheduler|lr[ _]sched\w*|scaler|loss scale|rng|momentum|exp_avg)"
    r"[^.;|]{0,60}?\b(?:not (?:found|loaded|restored|saved|in (?:the )?checkpoint)|missing|"
    r"skipp(?:ed|ing)|re-?initiali[sz]ed|reset\b|from scratch|starting fresh|fresh|empty|absent)|"
    r"\b(?:no|without|missing|skipp(?:ed|ing) (?:loading )?(?:of )?)(?: the)? "
    r"(?:optim\w*|scheduler|scaler|lr[ _]scheduler)(?: state\w*)?|"
    r"--no-load-(?:optim|rng)|no_load_(?:optim|rng)[=: ]+true|"
    r"weights[ _-]only[=: ]+true"
)


_GOES_ON = re.compile(r"(?i)\bresum|\bstart|\bload|\bbegin|\bcontinu")
_STEP = re.compile(r"(?i)^(?:\w+ )?(?:global[_ ])?(?:step|iteration)(?: counter| count)?$")


def rule(rows: Sequence[Row], policy: Policy) -> list[Finding]:
    """Numbers first, then words."""
    return _settings(rows, policy) or _lost(rows)


def ranks(evidence: Evidence) -> list[Finding]:
    """Steps or rates at which ranks go on after a restart, not the same on all of them."""
    for spread_label, by_rank in _firsts(evidence.measures.rows).items():
        values = Counter(text for text, _ in by_rank.values())
        if len(by_rank) < 2 or len(values) < 2:
            continue
        most, times = values.most_common(1)[0]
        odd = [r for r, (text, _) in by_rank.items() if text != most]
        zero = [r for r, (text, _) in by_rank.items() if number(text) == 0]
        named = zero or (odd if 2 * times > len(by_rank) else [])
        shown = ", ".join(f"rank {r}: {t}" for r, (t, _) in list(by_rank.items())[:8])
        other = next((r for r in odd), None)
        first = next(row for _, row in by_rank.values())
        items = [first] if other is None else [first, by_rank[other][1]]
        found = state_root(
            f"After the restart ranks go on with different {spread_label} ({shown}): not all of "
            "them loaded the checkpoint.",
            items,
            f"{spread_label}: {dict(values)}",
        )
        return [found.but(ranks=tuple(sorted(named)))]
    return []


def _firsts(rows: Sequence[Row]) -> dict[str, dict[int, tuple[str, Row]]]:
    """{what: {rank: (value, row)}} of each rank's first step and rate after the restart."""
    out: dict[str, dict[int, tuple[str, Row]]] = defaultdict(dict)
    for row in rows:
        if row.attempt == 0 or row.rank is None:
            continue
        if "step" in row.context and _GOES_ON.search(row.text):
            out["step"].setdefault(row.rank, (row.context["step"], row))
        for value in row.values:
            if _STEP.search(value.label) and value.number is not None and len(value.texts) == 1:
                out[value.label].setdefault(row.rank, (value.texts[0], row))
    return out


def state_root(summary: str, items: Sequence[Row], formula: str | None) -> Finding:
    """The finding, with what tells it from its look-alikes."""
    return root(
        "numeric.resume-state",
        "likely",
        summary,
        [],
        more=[r.item for r in items],
        excluded=(
            ("numeric.resume-data", "state, not sample order, differs"),
            ("numeric.replicas-diverged", "it begins at a restart"),
            ("numeric.divergence", "the jump is at the resume, not on a rising trend"),
        ),
        formula=formula,
    )


def _settings(rows: Sequence[Row], policy: Policy) -> list[Finding]:
    """Learning rate or loss scale that is another one right after the restart."""
    points: dict[tuple[str, str], list[tuple[float, Row]]] = defaultdict(list)
    losses: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for row in rows:
        for value in row.values:
            one = value.number
            if one is None or one <= 0 or len(value.texts) > 1:
                continue
            if value.quantity in ("rate", "scale"):
                points[row.source, value.quantity].append((one, row))
            elif value.quantity == "loss" and not value.reference:
                losses[row.source].append((one, row))
    for (source, quantity), all_points in points.items():
        for (before, old), (after, new) in pairwise(all_points):
            if new.attempt <= old.attempt:
                continue
            steps = [p[0] for p in all_points if p[1].attempt == old.attempt]
            usual = max((max(a, b) / min(a, b) for a, b in pairwise(steps)), default=1.0)
            jump = max(before, after) / min(before, after)
            if (
                jump < policy.resume_jump
                or jump < 2 * usual - 1
                or not _loss_jumps(losses[source], new)
            ):
                continue
            name = "learning rate" if quantity == "rate" else "loss scale"
            return [
                state_root(
                    f"At the restart the {name} goes from {before:.4g} to {after:.4g} and the "
                    "loss leaves its level: that state did not come back.",
                    [old, new],
                    f"{after:.4g} / {before:.4g} = {after / before:.3g}; before the restart it "
                    f"changed by at most {usual:.3g} a report",
                )
            ]
    return []


def _loss_jumps(losses: Sequence[tuple[float, Row]], new: Row) -> bool:
    """Whether the loss right after the restart is out of the range right before it."""
    before = [v for v, r in losses if r.attempt < new.attempt][-10:]
    after = [v for v, r in losses if r.attempt == new.attempt][:5]
    if len(before) < 2 or not after:
        return False
    width = max(max(before) - min(before), 0.005 * abs(median(before)))
    return abs(median(after) - median(before)) > 1.5 * width


def _lost(rows: Sequence[Row]) -> list[Finding]:
    """A line that says which state was not loaded, and a loss that jumps there."""
    losses = [
        (n, row)
        for row in rows
        for v in row.values
        if v.quantity == "loss" and (n := v.number) is not None and not v.reference
    ]
    for row in rows:
        found = _LOST.search(row.text) if row.kind != "code" else None
        if found is None or "not an error" in row.text:
            continue
        after = next((r for _, r in losses if r.source == row.source and r.line > row.line), None)
        same = [p for p in losses if p[1].source == row.source]
        if after is None or not _loss_jumps(same, after):
            continue
        return [
            state_root(
                f"At the restart not all state came back ({found.group().strip()[:80]}), and the "
                "loss leaves its level there.",
                [row, after],
                None,
            )
        ]
    return []


def data_root(summary: str, items: Sequence[Row], formula: str) -> Finding:
    """The finding that data are repeated or skipped."""
    return root(
        "numeric.resume-data",
        "likely",
        summary,
        [],
        more=[r.item for r in items],
        excluded=(
            ("numeric.resume-state", "no state that was printed differs from the saved one"),
            ("numeric.sampler-not-reseeded", "it starts at a restart"),
            ("numeric.shards-overlap", "the repetition is over time, not between ranks"),
            ("numeric.divergence", "it is at the restart"),
        ),
        formula=formula,
    )
