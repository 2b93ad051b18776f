"""Ranks with different numbers of batches: hang.uneven-inputs.

In: what the ranks say of their epochs and steps, watchdog lines; of a run directory, steps, ends
and waits. Out: one root finding when some ranks say that their epoch is over while others are in a
later batch of it, and the job then stands still; or when some ended well after a step and others
wait for them in a later one. Ranks that say nothing of either are on no side; with only one side
speaking nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks import logs
from playbooks.finding import Finding, Item
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Ended on one side, another batch on the other, and nobody goes on."""
    if evidence.run and (found := _left(evidence, policy)):
        return found
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


def _left(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Ranks that ended well between two steps, while others wait for them in a later one."""
    line = evidence.timeline
    raised = {r.rank for r in evidence.raised}
    last = {}
    for row, rank in enumerate(line.ranks):
        begun = np.flatnonzero(line.start_ns[row] >= 0)
        if begun.size:
            last[rank] = (int(line.steps[begun[-1]]), bool(line.end_ns[row, begun[-1]] >= 0))
    left = {
        e.rank: e
        for e in evidence.ends
        if e.exit_code == 0 and not e.signal and e.closed and e.rank not in raised
        if last.get(e.rank, (0, False))[1]
    }
    going = [r for r in last if r not in left]
    if not left or not going:
        return []
    end = max(last[r][0] for r in left)
    waits = [
        w
        for w in evidence.waits.waits
        if w.call.rank in going and set(w.absent) & set(left) and last[w.call.rank][0] > end
    ]
    if not waits or len(waits) < len(going) / 2:
        return []
    ranks = tuple(sorted(left))
    call = waits[0].call
    group = evidence.groups[call.group].label
    items = [left[r].item for r in ranks[:2]]
    items += [
        Item(f"ranks/{r:05d}", f"step {last[r][0]}", f"the last step of rank {r}, which ended")
        for r in ranks[:2]
    ]
    text = f"rank {call.rank} was in {call.op} #{call.seq} of {group}, which they never entered"
    items.append(Item(call.source, call.locator, text))
    return [
        Finding(
            "hang.uneven-inputs",
            "root",
            "likely",
            f"{ranks_words(ranks, capital=True)} ended well after step {end}, while "
            f"{ranks_words(going)} began another step and waited for "
            f"{'it' if len(ranks) == 1 else 'them'}.",
            ranks=ranks,
            evidence=tuple(items[: policy.evidence_most]),
            excluded=(
                ("hang.rank-died", "it ended with exit code 0, between two steps"),
                ("hang.rank-stalled", "its process had ended in the regular way"),
            ),
            at_ns=call.issue_ns,
        )
    ]


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
