"""Uncaught exceptions: crash.user-exception, and the causes that an error's text is by itself.

In: what the ranks raised. Out: at most one root finding, the earliest error that is not an echo of
another rank's end. Out-of-memory errors are another family's (memory.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.finding import Confidence, Finding, Item
from playbooks.rules.common import inside_c10d, is_after_the_fact, own_frame, where_was
from playbooks.words import ranks_words, shorten

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.facts import Raised
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The earliest real exception; all ranks that raised the same at once are culprits."""
    real = [
        r
        for r in evidence.raised
        if r.kind.cause is not None and not is_after_the_fact(evidence, policy, r.at_ns)
    ]
    if not real:
        return []
    clear = [r for r in real if not inside_c10d(r.traceback)]
    found = clear or real
    first = found[0]
    alike = [r for r in found if r.text == first.text and _together(r, first, policy)] or [first]
    ranks = tuple(sorted({r.rank for r in alike if r.rank is not None}))
    return [_finding(evidence, policy, first, ranks, alike, sure=bool(clear))]


def _together(one: Raised, first: Raised, policy: Policy) -> bool:
    if one.at_ns is None or first.at_ns is None:
        return True
    return one.at_ns - first.at_ns <= policy.together_ns


def _confidence(evidence: Evidence, first: Raised, sure: bool) -> Confidence:
    """Certain when every rank's end is known or the order of the errors is."""
    if not sure:
        return "possible"
    if evidence.loose and (evidence.missing or evidence.world_size is None):
        return "likely"
    others = [r for r in evidence.raised if r is not first and r.kind.cause and r.at_ns is None]
    return "likely" if others and first.at_ns is None else "certain"


def _finding(
    evidence: Evidence,
    policy: Policy,
    first: Raised,
    ranks: tuple[int, ...],
    alike: list[Raised],
    *,
    sure: bool,
) -> Finding:
    place = own_frame(first.traceback)
    who = ranks_words(ranks, capital=True) if ranks else "A rank"
    where = where_was(evidence, ranks[0]) if len(ranks) == 1 else ""
    at = f" at {place}" if place else ""
    items = [r.item for r in alike[:3]]
    if place:
        items.append(Item(first.item.source, "traceback", place))
    items += [r.item for r in evidence.raised if r.kind.name in ("peer", "timeout")][:1]
    cause = first.kind.cause or "crash.user-exception"
    excluded = []
    if ranks:
        excluded.append(("hang.rank-died", "its own traceback says why it ended"))
    return Finding(
        cause,
        "root",
        _confidence(evidence, first, sure),
        f"{who} raised {shorten(first.text)}{at}{where}.",
        ranks=ranks,
        evidence=tuple(items[: policy.evidence_most]),
        excluded=tuple(excluded),
        at_ns=first.at_ns,
    )
