"""Ranks with different numbers of batches: hang.uneven-inputs.

In: what the ranks say of their epochs and steps, watchdog lines. Out: one root finding when some
ranks say that their epoch is over while others are in a later batch of it, and the job then stands
still. Ranks that say nothing of either are on no side; with only one side speaking nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.finding import Finding, Item
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Ended on one side, another batch on the other, and nobody goes on."""
    story = evidence.story
    if not story.timeouts and not story.of("gloo.timeout", "gloo.monitored-barrier"):
        return []
    over = _over(evidence)
    last = _last_steps(evidence)
    if not over:
        return []
    told = [n for n in (batches for batches, _row in over.values()) if n is not None]
    if len(set(told)) > 1 and len(over) > 1:
        return [_finding(evidence, policy, *_by_count(over))]
    if told:
        most = max(told)
    else:
        # Without a number the last batch that an early rank logged stands for it; a rank that logs
        # every n-th batch only is at most one such line behind.
        known = [last[r][0] for r in over if r in last]
        if not known:
            return []
        most = max(known)
    going = {r: found for r, found in last.items() if r not in over and found[0] > most}
    if not going:
        return []
    ended = {r: row for r, (_n, row) in over.items()}
    return [_finding(evidence, policy, ended, {r: row for r, (_s, row) in going.items()})]


def _over(evidence: Evidence) -> dict[int, tuple[int | None, dict[str, Any]]]:
    """Rank -> (batches it had, line) when its last word of its own is the end of an epoch."""
    out: dict[int, tuple[int | None, dict[str, Any]]] = {}
    kinds = ("train.epoch-end", "train.step", "train.caught")
    for row, fields in evidence.story.of(*kinds):
        rank = row["rank"]
        if rank is None:
            continue
        if row["kind"] == "train.epoch-end":
            out[rank] = (fields.get("batches"), row)
        else:
            out.pop(rank, None)
    return out


def _last_steps(evidence: Evidence) -> dict[int, tuple[int, dict[str, Any]]]:
    out: dict[int, tuple[int, dict[str, Any]]] = {}
    for row, fields in evidence.story.of("train.step"):
        if row["rank"] is not None and isinstance(fields.get("step"), int):
            out[row["rank"]] = (fields["step"], row)
    return out


def _by_count(
    over: dict[int, tuple[int | None, dict[str, Any]]],
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Ranks with the fewest batches, and those with more."""
    few = min(n for n, _ in over.values() if n is not None)
    early = {r: row for r, (n, row) in over.items() if n == few}
    late = {r: row for r, (n, row) in over.items() if n is not None and n > few}
    return early, late


def _finding(
    evidence: Evidence,
    policy: Policy,
    ended: dict[int, dict[str, Any]],
    going: dict[int, dict[str, Any]],
) -> Finding:
    fewer = tuple(sorted(ended if len(ended) <= len(going) else going))
    ranks = fewer if len(ended) != len(going) else ()
    waits = [Item(t.row["source"], t.row["locator"], t.row["quote"] or "") for t in _two(evidence)]
    items = [logs.item(ended[r]) for r in sorted(ended)[:2]]
    items += [logs.item(going[r]) for r in sorted(going)[:2]]
    return Finding(
        "hang.uneven-inputs",
        "root",
        "likely",
        f"{ranks_words(ended, capital=True)} came to the end of the epoch's batches while "
        f"{ranks_words(going)} had more of them, and each side then waits for the other.",
        ranks=ranks,
        evidence=tuple((items + waits)[: policy.evidence_most]),
        excluded=(
            ("hang.collective-mismatch", "the ranks are in different steps"),
            ("hang.rank-stalled", "the early ranks' data is exhausted, not stuck"),
        ),
        at_ns=evidence.story.since_ns,
    )


def _two(evidence: Evidence) -> list[Any]:
    """A timeout of each of the two kinds of operation in which the ranks wait."""
    seen: dict[str, Any] = {}
    for timeout in evidence.story.timeouts.values():
        seen.setdefault(timeout.op, timeout)
    return list(seen.values())[:2]
