"""A rank that caught an error and went on alone: hang.exception-swallowed.

In: lines in which programs say that they caught or skipped something, watchdog lines, ends. Out:
one root finding when a minority of the ranks did so just before the others began to wait for them.
An error that all ranks caught alike, or after which the job went on, is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.finding import Finding, Item
from playbooks.rules.mismatch import ahead, first_difference, split
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Caught on a few ranks, then everybody waits."""
    story = evidence.story
    if evidence.run and (found := _skipped(evidence, policy)):
        return [found]
    if not story.timeouts:
        return []
    caught = _caught(evidence, policy)
    others = set(story.timeouts) - set(caught)
    if not caught or not others or len(caught) * 2 > len(story.ranks):
        return []
    raised = {r.rank for r in evidence.raised if r.kind.cause is not None}
    if raised & set(caught):
        return []
    apart = [r for r in caught if _apart(evidence, r)]
    if not apart:
        return []
    ranks = tuple(sorted(apart))
    rows = [caught[r] for r in ranks]
    waiting = next(t for r, t in sorted(story.timeouts.items()) if r in others)
    items = [logs.item(row) for row in rows[:3]]
    items += [logs.item(story.timeouts[r].row) for r in ranks if r in story.timeouts][:1]
    items.append(Item(waiting.row["source"], waiting.row["locator"], waiting.row["quote"] or ""))
    times = [row["time_ns"] for row in rows if row["time_ns"] is not None]
    return [
        Finding(
            "hang.exception-swallowed",
            "root",
            "likely",
            f"{ranks_words(ranks, capital=True)} caught an error and went on past part of a step; "
            f"{ranks_words(others)} wait for it in {waiting.op} #{waiting.seq}.",
            ranks=ranks,
            evidence=tuple(items[: policy.evidence_most]),
            excluded=(
                ("hang.collective-mismatch", "a caught error precedes the first difference"),
                ("crash.user-exception", "the process did not end by it"),
            ),
            at_ns=min(times) if times else None,
        )
    ]


def _skipped(evidence: Evidence, policy: Policy) -> Finding | None:
    """Ranks that are in a later step than their peers when collectives first differ, after a caught
    error that no step of the job followed."""
    calls = first_difference(evidence.ledger)
    ranks, decided = split(calls, policy) if calls else ((), False)
    if not decided or not ahead(calls, ranks):
        return None
    rows: list[dict[str, Any]] = []
    for row, _fields in evidence.story.of("train.caught", "train.step"):
        rows = [*rows, row] if row["kind"] == "train.caught" else []
    told = {row["rank"] for row in rows}
    if not rows or len(rows) > len(ranks) or told - {None, *ranks}:
        return None
    odd = next(c for c in calls if c.rank in ranks)
    rest = next(c for c in calls if c.rank not in ranks)
    items = [logs.item(row) for row in rows[:2]]
    items += [
        Item(c.source, c.locator, f"rank {c.rank} in step {c.step}: {c.words()} as #{c.seq}")
        for c in (odd, rest)
    ]
    return Finding(
        "hang.exception-swallowed",
        "root",
        "likely",
        f"{ranks_words(ranks, capital=True)} caught an error and went on to step {odd.step}, while "
        f"the others are still in the collectives of step {rest.step}.",
        ranks=ranks,
        evidence=tuple(items[: policy.evidence_most]),
        excluded=(
            ("hang.collective-mismatch", "a caught error precedes the first difference"),
            ("crash.user-exception", "the process did not end by it"),
        ),
        at_ns=min((c.issue_ns for c in calls if c.issue_ns is not None), default=None),
    )


def _caught(evidence: Evidence, policy: Policy) -> dict[int, dict[str, Any]]:
    """Rank -> its last caught error near the begin of the wait, after its last step."""
    story = evidence.story
    since, expired = story.since_ns, story.expired_ns
    out: dict[int, dict[str, Any]] = {}
    for row, _fields in story.of("train.caught", "train.step"):
        rank = row["rank"]
        if rank is None:
            continue
        if row["kind"] == "train.step":
            out.pop(rank, None)  # the job went on
            continue
        at = row["time_ns"]
        if at is not None and since is not None and expired is not None:
            slack = max(2 * (story.step_gap_ns or 0), policy.caught_before_ns)
            if not since - slack <= at <= expired:
                continue
        out.setdefault(rank, row)
    return out


def _apart(evidence: Evidence, rank: int) -> bool:
    """Whether the rank waits elsewhere than its peers, or does not wait at all."""
    story = evidence.story
    own = story.timeouts.get(rank)
    if own is None:
        return True
    others = [t for r, t in story.timeouts.items() if r != rank]
    return all((t.seq, t.op, t.size) != (own.seq, own.op, own.size) for t in others)
