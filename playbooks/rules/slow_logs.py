"""What sets the pace of a job that progresses, from logs: all slow.* that lines and tables tell.

In: the rules of this family. Out: one root, the narrowest that is found (a throttled GPU before a
slow rank, uneven stages before a bubble, few cores before slow input); the broader ones follow from
it and become its effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.rules import (
    arrivals,
    profiled,
    profiled_kernels,
    slow_data,
    slow_experts,
    slow_gpus,
    slow_host,
    slow_last,
    slow_pauses,
    slow_ranks,
    slow_reductions,
    slow_sharding,
    slow_shares,
    slow_stacks,
    slow_stages,
)

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

_RULES = (
    slow_gpus.rule,
    slow_host.rule,
    slow_pauses.rule,
    slow_experts.rule,
    slow_stages.rule,
    slow_ranks.rule,
    slow_last.rule,
    slow_reductions.rule,
    slow_sharding.rule,
    slow_shares.rule,
    slow_data.rule,
    profiled.rule,
    arrivals.rule,
    profiled_kernels.rule,
    slow_stacks.rule,
)
_NARROW = (
    "gpu-throttled",
    "cpu-affinity",
    "gc-pauses",
    "recompiles",
    "expert-imbalance",
    "stage-imbalance",
    "work-imbalance",
    "straggler-input",
    "straggler-compute",
    "sync-every-microstep",
    "offload-bound",
    "over-sharded",
    "pipeline-bubble",
    "checkpoint-stall",
    "data-bound",
    "host-bound",
    "comm-exposed",
)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The narrowest root, and what follows from it."""
    found = [finding for one in _RULES for finding in one(evidence, policy)]
    found.sort(key=lambda f: (f.confidence == "possible", _NARROW.index(f.cause[5:])))
    if not found:
        return []
    first, *rest = found
    if evidence.run and first.cause == "slow.pipeline-bubble":
        # A schedule of few microbatches is chosen; in a run its cost is told among the numbers.
        first = first.but(role="context", confidence="possible")
    out = [first]
    for finding in rest:
        if finding.cause not in {f.cause for f in out}:
            out.append(finding.but(role="effect", caused_by=first.cause, advice=()))
    return out
