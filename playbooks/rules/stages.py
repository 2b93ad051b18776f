"""Pipeline stages of unequal work: the one that all others wait for in every step.

In: Evidence with steps and stages. A stage is at fault when each of its ranks is busy far longer
than any other stage's ranks, in nearly every step; one slow rank among several of a stage is a
straggler, which is another rule's. The replay of the steps says what evening the stages would save.
Megatron's advice counts the head and the loss as layers of the last stage for this reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from playbooks.finding import Finding, Item
from playbooks.metrics import what_if
from playbooks.words import ranks_words, seconds

if TYPE_CHECKING:
    import numpy.typing as npt

    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

    Floats = npt.NDArray[np.float64]


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """slow.stage-imbalance of one stage, or nothing."""
    line, stages = evidence.timeline, evidence.stages
    steady = line.steady(policy.warmup_steps)
    rows: dict[int, list[int]] = {}
    for row, rank in enumerate(line.ranks):
        if rank in stages:
            rows.setdefault(stages[rank], []).append(row)
    few = min((len(own) for own in rows.values()), default=0) < 2
    if len(rows) < 2 or few or steady.size < policy.straggler_steps:
        return []
    busy = line.busy[:, steady]
    least = {stage: busy[own].min(axis=0) for stage, own in rows.items()}
    most = {stage: busy[own].max(axis=0) for stage, own in rows.items()}
    heavy = max(least, key=lambda stage: float(np.median(least[stage])))
    rest = np.max([most[stage] for stage in rows if stage != heavy], axis=0)
    step = np.median(line.seconds[:, steady], axis=0)
    beyond = (least[heavy] - rest) / step
    if (
        float(np.median(beyond)) < policy.straggler_share
        or float(np.mean(beyond >= policy.straggler_share / 2)) < policy.straggler_consistency
    ):
        return []
    ranks = tuple(line.ranks[row] for row in rows[heavy])
    own, other = float(np.median(least[heavy])), float(np.median(rest))
    return [_finding(evidence, policy, heavy, ranks, (own, other, float(np.median(step))))]


def _finding(
    evidence: Evidence,
    policy: Policy,
    stage: int,
    ranks: tuple[int, ...],
    times: tuple[float, float, float],
) -> Finding:
    own, other, step = times
    names = "first" if stage == 0 else "last" if stage == max(evidence.stages.values()) else None
    called = f"Stage {stage}" + (f" (the {names})" if names else "")
    share = (own - other) / step
    items = [
        Item(
            f"ranks/{rank:05d}",
            "all measured steps",
            f"busy {seconds(_busy(evidence, policy, rank))} of each step (stage {stage})",
        )
        for rank in ranks[:4]
    ]
    again = what_if.answer(evidence, policy)
    if again is not None and str(stage) in again["by_stage"]:
        part = again["by_stage"][str(stage)]
        items.append(
            Item(
                "replay",
                f"{again['steps']} steps",
                f"with only stage {stage} slow the step takes {part['slowdown']:.2f} times the "
                f"even one ({seconds(again['ordinary_s'])})",
            )
        )
    return Finding(
        "slow.stage-imbalance",
        "root",
        "likely",
        f"{called} works {seconds(own - other)} longer in every step than any other stage "
        f"({share:.0%} of the step), and all of its {len(ranks)} ranks do.",
        ranks=ranks,
        axis="pp",
        evidence=tuple(items),
        excluded=(
            ("slow.straggler-compute", f"all ranks of the stage ({ranks_words(ranks)}) are slow"),
        ),
        formula=f"(busy of its fastest rank {seconds(own)} - busy of the slowest rank elsewhere "
        f"{seconds(other)}) / step {seconds(step)} = {share:.0%}",
    )


def _busy(evidence: Evidence, policy: Policy, rank: int) -> float:
    line = evidence.timeline
    row = line.ranks.index(rank)
    return float(np.median(line.busy[row, line.steady(policy.warmup_steps)]))
