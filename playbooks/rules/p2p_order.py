"""Ranks that wait for each other in sends and receives that do not pair: hang.collective-mismatch.

In: who waits for whom, stacks. Out: one root finding for a circle in which every rank sits in a
send or receive whose other half the next one never issued (send against send, for one). A rank that
only posted a send and is elsewhere breaks the circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.finding import Finding, Item
from playbooks.rules.common import is_in_operation
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy
    from playbooks.waiting import Wait

_PLURAL = {"send": "sends", "recv": "receives"}


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A circle of waits in point-to-point operations alone."""
    if not evidence.stopped or evidence.gone:
        return []
    waits = {
        w.call.rank: w
        for w in evidence.waits.main()
        if w.call.p2p and len(w.absent) == 1 and _blocks(evidence, w)
    }
    circle = _circle(waits)
    if len(circle) < 2:
        return []
    calls = [waits[r].call for r in circle]
    group = evidence.groups[calls[0].group]
    return [
        Finding(
            "hang.collective-mismatch",
            "root",
            "likely",
            f"{ranks_words(circle, capital=True)} wait for each other in {_ops(evidence, circle)}: "
            "none of them issued the other half.",
            ranks=tuple(sorted(circle)),
            group=group.label,
            axis=None if group.axis == "unknown" else group.axis,
            where="p2p",
            evidence=tuple(
                Item(
                    c.source,
                    c.locator,
                    f"rank {c.rank} is in {c.words()} #{c.seq} with rank {c.peer}, which issued no "
                    f"{'receive' if c.op.startswith('send') else 'send'} for it",
                )
                for c in calls[: policy.evidence_most]
            ),
            excluded=(("hang.rank-stalled", "each of them is in an operation"),),
            at_ns=max((c.issue_ns for c in calls if c.issue_ns is not None), default=None),
        )
    ]


def _blocks(evidence: Evidence, wait: Wait) -> bool:
    """Whether the rank sits in the operation; a send without frames may have returned at once."""
    if wait.call.op.startswith("send") and not evidence.stacks.get(wait.call.rank):
        return False
    return is_in_operation(evidence, wait.call.rank)


def _ops(evidence: Evidence, circle: list[int]) -> str:
    ops = {w.call.op for w in evidence.waits.main() if w.call.rank in circle}
    return " and ".join(_PLURAL.get(op, op) for op in sorted(ops))


def _circle(waits: dict[int, Wait]) -> list[int]:
    for start in sorted(waits):
        path = [start]
        while (following := waits[path[-1]].absent[0]) in waits:
            if following in path:
                return path[path.index(following) :]
            path.append(following)
    return []
