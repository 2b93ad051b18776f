"""Groups whose operations were issued in another order: hang.collective-mismatch, group-order.

In: who waits for whom. Out: one root finding when the waits form a circle over at least two groups
while each group's own sequence agrees: every rank in the circle waits in one group for a rank that
waits in another. Sends and receives are left out: they may return before their other half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.finding import Finding, Item
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from playbooks.evidence import Evidence
    from playbooks.policy import Policy
    from playbooks.waiting import Wait


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A circle of waits, which no lateness can explain."""
    if not evidence.stopped or evidence.gone or evidence.ledger.differing.size:
        return []
    waits = {w.call.rank: w for w in evidence.waits.main() if not w.call.p2p and w.call.rank >= 0}
    circle = _circle(waits)
    groups = {waits[r].call.group for r in circle}
    if len(circle) < 2 or len(groups) < 2:
        return []
    items = [
        Item(
            waits[r].call.source,
            waits[r].call.locator,
            f"rank {r} is in {waits[r].call.op} #{waits[r].call.seq} of "
            f"{evidence.groups[waits[r].call.group].label} and waits for "
            f"{ranks_words(waits[r].absent)}",
        )
        for r in circle
    ]
    times = [w.call.issue_ns for r, w in waits.items() if r in circle and w.call.issue_ns]
    return [
        Finding(
            "hang.collective-mismatch",
            "root",
            "likely",
            f"{ranks_words(circle, capital=True)} wait for each other in {len(groups)} groups: "
            "they issued the operations of these groups in another order.",
            ranks=tuple(sorted(circle)),
            where="group-order",
            evidence=tuple(items[: policy.evidence_most]),
            excluded=(
                ("hang.rank-stalled", "no rank outside the circle is awaited"),
                ("hang.transport", "members are missing from the operations"),
            ),
            at_ns=min(times) if times else None,
        )
    ]


def _circle(waits: Mapping[int, Wait]) -> list[int]:
    """The ranks of one circle; empty when every chain ends at a rank that waits for nobody."""
    for start in sorted(waits):
        path = [start]
        while True:
            following = [r for r in waits[path[-1]].absent if r in waits]
            if len(following) != len(waits[path[-1]].absent) or not following:
                break  # some rank that is awaited is in no collective: it comes first
            step = min(following)
            if step in path:
                return path[path.index(step) :]
            path.append(step)
    return []
