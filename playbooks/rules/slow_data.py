"""Most of a job waits for its input: slow.data-bound, from progress lines with a time for data.

In: train.step events with data_time and step_time. Out: at most one root. Tables of phases are
slow_shares'.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Share of each step that ranks wait for their batch."""
    if evidence.breakdown.typical("data") is not None:
        return []  # tables and lines of phases tell it better
    shares: dict[int | None, list[float]] = defaultdict(list)
    events: list[Event] = []
    for event in evidence.lines.of("train.step"):
        data, step = event.number("data_time"), event.number("step_time")
        if data is not None and step is not None and 0 <= data <= step and step > 0:
            shares[event.rank].append(data / step)
            events.append(event)
    known = {r: median(v) for r, v in shares.items() if len(v) >= policy.data_bound_steps}
    bound = [r for r, share in known.items() if share >= policy.data_bound_share]
    if not known or len(bound) <= policy.data_bound_ranks * len(known):
        return []
    typical = median(known.values())
    who = f"{len(bound)} of {len(known)} ranks wait" if len(known) > 1 else "The job waits"
    return [
        root(
            "slow.data-bound",
            "likely",
            f"{who} {typical:.0%} of each step for the next batch.",
            [*events[:3], *evidence.lines.of("gpu.sample")[:1]],
            excluded=(
                ("slow.straggler-input", "nearly all ranks wait, not one"),
                ("slow.host-bound", "the wait is for the batch"),
            ),
            formula=f"median of data time / step time = {typical:.0%}",
        )
    ]
