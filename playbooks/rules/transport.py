"""Everybody is inside the same operation and nobody leaves: hang.transport.

In: pending operations without an absent member. Out: one root finding, at most likely, and only
when every member of the group was seen inside; with a rank's records missing the answer is open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks import logs
from playbooks.finding import Finding, Item
from playbooks.rules.common import SIGABRT, SIGTERM
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """All in, none out, signatures equal, nobody dead."""
    logged = _logged(evidence, policy)
    if logged:
        return logged
    if not evidence.stopped or evidence.gone or evidence.ledger.differing.size:
        return []
    if evidence.waits.ends():
        return []
    for waits in evidence.waits.entered():
        group = evidence.groups[waits[0].call.group]
        entered = {w.call.rank for w in waits}
        if not group.declared or entered != set(group.members) or len(entered) < 2:
            continue
        if evidence.missing:
            return []
        call = waits[0].call
        seen = evidence.hang is not None or bool(evidence.ledger.failed.any())
        text = (
            f"All {len(entered)} members of {group.label} entered {call.words()} #{call.seq} with "
            "equal arguments and none left it; no component is named."
        )
        items = [
            Item(w.call.source, w.call.locator, f"rank {w.call.rank} in {call.op} #{call.seq}")
            for w in waits[: policy.evidence_most]
        ]
        return [
            Finding(
                "hang.transport",
                "root",
                "likely" if seen else "possible",
                text,
                group=group.label,
                axis=None if group.axis == "unknown" else group.axis,
                evidence=tuple(items + evidence.hang_items),
                excluded=(
                    ("hang.rank-stalled", "no member is missing"),
                    ("hang.collective-mismatch", "the signatures agree"),
                    ("hang.rank-died", f"{ranks_words(entered)} live"),
                ),
                at_ns=(evidence.hang or {}).get("since_ns") or call.issue_ns,
            )
        ]
    return []


def _logged(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Watchdog lines of every rank of the world, all about the same operation."""
    story = evidence.story
    told = list(story.timeouts.values())
    world = evidence.world_size or 0
    if world < 2 or len(evidence.ledger) or set(story.timeouts) != set(range(world)):
        return []
    if len({(t.group, t.seq, t.op, t.size) for t in told}) != 1:
        return []
    if any(r.kind.cause is not None for r in evidence.raised):
        return []
    if any(e.signal not in (None, SIGABRT, SIGTERM) for e in evidence.ends):
        return []
    first = told[0]
    return [
        Finding(
            "hang.transport",
            "root",
            "possible",
            f"All {world} ranks timed out in {first.op} #{first.seq} with equal arguments; no "
            "component is named.",
            evidence=tuple(logs.item(t.row) for t in told[: policy.evidence_most]),
            excluded=(
                ("hang.rank-stalled", "no rank is missing from the operation"),
                ("hang.collective-mismatch", "the signatures agree"),
            ),
            at_ns=story.since_ns,
        )
    ]
