"""A process whose interpreter lock never comes free: hang.gil-held.

In: stacks of all threads, the heartbeat monitor's lines, watchdog lines. Out: one root finding. The
monitor's line alone may also mean a CUDA call that blocks, so it carries no more than "possible",
and only when that rank is the one that the others wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.finding import Finding, Item
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

_WANT_LOCK = ("take_gil", "PyEval_RestoreThread", "PyGILState_Ensure", "PyEval_AcquireThread")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A thread in native code holds the lock, and the others want it."""
    holders = _holders(evidence)
    said = {row["rank"]: row for row, _ in evidence.story.of("nccl.gil") if row["rank"] is not None}
    stuck = {row["rank"] for row, _ in evidence.story.of("nccl.heartbeat-stuck")}
    awaited = _awaited(evidence)
    ranks = sorted(r for r in holders if r in said or r in stuck or r in awaited)
    if ranks:
        return [_finding(evidence, policy, ranks, holders, said)]
    ranks = sorted(r for r in said if r in awaited and r not in evidence.stacks)
    if ranks and len(ranks) * 2 < len(evidence.story.ranks):
        return [_finding(evidence, policy, ranks, holders, said)]
    return []


def _awaited(evidence: Evidence) -> set[int]:
    """Ranks for which others wait, by the ledger or because they alone printed no timeout."""
    found = set(evidence.waits.ends())
    absent = evidence.story.absent
    if absent and len(absent) * 2 < len(evidence.story.ranks):
        found |= absent
    return found


def _holders(evidence: Evidence) -> dict[int, list[dict[str, Any]]]:
    """Rank -> [holder's row, a waiting thread's row] at its last look."""
    looks: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for row in evidence.collected.rows("stacks"):
        if row["rank"] is not None and row["frames"] and row["state"] != "issuing":
            looks.setdefault(row["rank"], {}).setdefault(row["look"] or 0, []).append(row)
    out = {}
    for rank, found in looks.items():
        threads = found[max(found)]
        holder = [t for t in threads if t["state"] == "gil" and _native(t["frames"][0])]
        wants = [
            t
            for t in threads
            if t not in holder and any(w in f for f in t["frames"][:6] for w in _WANT_LOCK)
        ]
        if holder and wants:
            out[rank] = [holder[0], wants[0]]
    return out


def _native(frame: str) -> bool:
    """Whether the frame is compiled code: no Python file, and not the interpreter itself."""
    return ".py:" not in frame and "<" not in frame.split("(", maxsplit=1)[0]


def _finding(
    evidence: Evidence,
    policy: Policy,
    ranks: list[int],
    holders: dict[int, list[dict[str, Any]]],
    said: dict[int, dict[str, Any]],
) -> Finding:
    seen = [r for r in ranks if r in holders]
    where = f", in {holders[seen[0]][0]['frames'][0]}" if seen else ""
    items = []
    for rank in seen[:2]:
        for row in holders[rank]:
            text = f"{row['thread']} ({row['state']}): {' <- '.join(row['frames'][:3])}"
            items.append(Item(row["source"] or "stacks", row["locator"] or "", text))
    items += [logs.item(said[r]) for r in ranks if r in said][:2]
    items += [logs.item(t.row) for _r, t in sorted(evidence.story.waiting.items())][:1]
    return Finding(
        "hang.gil-held",
        "root",
        "likely" if seen else "possible",
        f"{ranks_words(ranks, capital=True)} cannot run any Python thread: native code holds the "
        f"interpreter lock{where}.",
        ranks=tuple(ranks),
        evidence=tuple(items[: policy.evidence_most]),
        excluded=(
            ("hang.rank-stalled", "its other Python threads are silent too"),
            ("hang.rank-died", "the process exists"),
        ),
        at_ns=evidence.story.since_ns,
    )
