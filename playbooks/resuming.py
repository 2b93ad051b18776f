"""Whether a job that supervision saw standing still went on by itself.

In: Evidence. Out: the time, or None. Progress is a step that ends, the completion of what every
waiting rank waited for, or (when none waited) a later record of every living rank. What happens
once the job is being ended is no progress: a kill closes phases and fails operations too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from playbooks.policy import SECOND

if TYPE_CHECKING:
    from playbooks.evidence import Evidence

_NEVER = int(np.iinfo(np.int64).max)
_ENDING_NS = 2 * SECOND
"""Records this close before a failed end may be the end's own work."""


def resumed_ns(evidence: Evidence) -> int | None:
    """When the job went on after the last stretch without progress; None when it never did."""
    seen = (evidence.hang or {}).get("detected_ns")
    if not seen:
        return None
    seen = int(seen)
    until = _ending_ns(evidence, seen)
    told = (evidence.hang or {}).get("resumed_ns")
    ends = evidence.collected.ints("steps", "end_ns")
    found = [int(t) for t in ends[(ends > seen) & (ends < until)]]
    found += [t for t in (_completed(evidence, seen, until),) if t is not None]
    if isinstance(told, int) and not evidence.interrupted and told < until - _ENDING_NS:
        found.append(told)
    if not found and evidence.finished_well and not evidence.interrupted:
        found.append(int(evidence.run.get("ended_ns") or seen))
    return min(found, default=None)


def _ending_ns(evidence: Evidence, seen: int) -> int:
    """When the job began to end after `seen` in another way than well."""
    times = [e.at_ns for e in evidence.ends if (e.signal or e.exit_code) and (e.at_ns or 0) > seen]
    times += [r.at_ns for r in evidence.raised if (r.at_ns or 0) > seen]
    if not evidence.live and not evidence.finished_well:
        times.append(evidence.run.get("ended_ns"))
    return min((int(t) for t in times if t is not None), default=_NEVER)


def _completed(evidence: Evidence, seen: int, until: int) -> int | None:
    """When all had what they waited for at `seen`."""
    ledger = evidence.ledger
    waiting = ledger.unfinished(seen) & (ledger.rank >= 0)
    if not waiting.any():
        return _all_wrote(evidence, seen, until - _ENDING_NS)
    done = waiting & (ledger.end > seen) & (ledger.end < until) & ~ledger.failed
    if set(ledger.rank[done].tolist()) != set(ledger.rank[waiting].tolist()):
        return None
    return int(max(ledger.end[done & (ledger.rank == r)].min() for r in set(ledger.rank[done])))


def _all_wrote(evidence: Evidence, seen: int, until: int) -> int | None:
    """When the last of the living ranks wrote anything after `seen`."""
    first: dict[int, int] = {}
    for table in ("phases", "collectives"):
        ranks = evidence.collected.ints(table, "rank")
        for column in ("start_ns", "issue_ns", "end_ns"):
            if column == ("issue_ns" if table == "phases" else "start_ns"):
                continue
            times = evidence.collected.ints(table, column)
            new = (times > seen) & (times < until) & (ranks >= 0)
            for rank in np.unique(ranks[new]).tolist():
                earliest = int(times[new & (ranks == rank)].min())
                first[rank] = min(first.get(rank, earliest), earliest)
    ended = {e.rank for e in evidence.ends if e.at_ns is not None and e.at_ns <= seen}
    living = evidence.seen - ended
    return max(first[r] for r in living) if living and living <= first.keys() else None
