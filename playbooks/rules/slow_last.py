"""Slow ranks where no table of ranks is told: slow.work-imbalance, slow.straggler-compute, -input.

In: Parts of cp ranks; parts with the rank that came last and its lateness. Out: at most one root.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.rules.slow_ranks import reports_of
from playbooks.words import ranks_words, seconds

if TYPE_CHECKING:
    from playbooks.breakdown import Part
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The causal split, else the rank that comes last."""
    return _causal(evidence, policy) or _named_last(evidence, policy)


def _causal(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Ranks of a cp group of which each has more to compute than the one before it."""
    reports = reports_of(evidence, "cp")
    rising = []
    for report in reports:
        pace = [report.parts[u].compute or 0.0 for u in sorted(report.pace)]
        even = all(b > a for a, b in pairwise(pace))
        if even and pace[-1] - pace[0] >= policy.told_share * report.step:
            rising.append((report, pace))
    if len(rising) * 2 <= len(reports) or not rising or len(rising[0][1]) < 2:
        return []
    report, pace = rising[-1]
    units = sorted(report.pace)
    return [
        root(
            "slow.work-imbalance",
            "likely",
            f"Compute rises with the place in the context-parallel group, from {pace[0]:.4g} to "
            f"{pace[-1]:.4g}: the causal mask gives later ranks more to do.",
            [*report.parts[units[0]].events[:1], *report.parts[units[-1]].events[:1]],
            where="causal-split",
            excluded=(
                ("slow.straggler-compute", "time follows the share of the mask, not one rank"),
                ("slow.comm-exposed", "earlier ranks wait for later ones"),
            ),
            formula=f"{pace[-1]:.4g} / {pace[0]:.4g} over cp = {len(pace)}",
        )
    ]


def named_last(evidence: Evidence) -> list[tuple[Part, int, float]]:
    """(part, rank that came last, seconds that it was late), of every report that tells both."""
    out = []
    for part in evidence.breakdown.parts:
        last, late = part.values.get("last"), part.values.get("late")
        if last is not None and late is not None and last == int(last) and part.whole:
            out.append((part, int(last), late))
    return out


def _named_last(evidence: Evidence, policy: Policy) -> list[Finding]:
    told = named_last(evidence)
    late = [(p, r, t) for p, r, t in told if t >= policy.told_share * (p.step_s or p.whole or t)]
    if len(late) < policy.straggler_steps or len(late) * 2 < len(told):
        return []
    rank, times = Counter(r for _, r, _ in late).most_common(1)[0]
    if times < policy.straggler_consistency * len(late):
        return []
    mine = [(p, t) for p, r, t in late if r == rank]
    data = median(p.values.get("data", 0.0) / t for p, t in mine)
    by_input = data >= policy.straggler_cause_share
    typical = median(t for _, t in mine)
    return [
        root(
            "slow.straggler-input" if by_input else "slow.straggler-compute",
            "likely",
            f"{ranks_words([rank], capital=True)} comes last in {times} of {len(late)} "
            f"late reports, "
            f"{seconds(typical)} behind the others.",
            [e for p, _ in mine[:4] for e in p.events[:1]],
            ranks=(rank,),
            excluded=(("slow.work-imbalance", "the last rank does not change"),),
            formula=f"last in {times} of {len(late)}",
        )
    ]
