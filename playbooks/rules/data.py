"""Input sets the pace on most ranks: slow.data-bound.

In: data phases of all ranks. Out: one root finding without culprits among the ranks, since nearly
all of them wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from playbooks.finding import Finding, Item
from playbooks.timeline import INPUT
from playbooks.words import seconds

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Most ranks spend a large share of their steps waiting for the next batch."""
    line = evidence.timeline
    steady = line.steady(policy.warmup_steps)
    waiting = line.summed(INPUT)
    if waiting is None or steady.size < policy.data_bound_steps:
        return []
    share = np.median(waiting[:, steady] / line.seconds[:, steady], axis=1)
    bound = share >= policy.data_bound_share
    if float(np.mean(bound)) <= policy.data_bound_ranks:
        return []
    typical = float(np.median(share))
    spent = float(np.median(waiting[:, steady]))
    step = float(np.median(line.seconds[:, steady]))
    worst = int(np.argmax(share))
    place = f"steps {int(line.steps[steady[0]])}..{int(line.steps[steady[-1]])}"
    items = tuple(
        Item(f"ranks/{rank:05d}", f"{place}, phase data", f"{share[i]:.0%} of the step")
        for i, rank in enumerate(line.ranks[:4])
    )
    return [
        Finding(
            "slow.data-bound",
            "root",
            "likely",
            f"{int(bound.sum())} of {len(line.ranks)} ranks wait {typical:.0%} of each step for "
            f"their batch (at most {share[worst]:.0%}, rank {line.ranks[worst]}).",
            evidence=items,
            excluded=(("slow.straggler-input", "nearly all ranks wait, not one"),),
            formula=f"data {seconds(spent)} / step {seconds(step)} = {typical:.0%}",
            at_ns=int(line.start_ns[0, steady[0]]),
        )
    ]
