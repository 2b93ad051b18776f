"""Jobs that were ended from outside: crash.scheduler-ended, crash.node-lost.

In: lines of schedulers and orchestrators, the launcher's heartbeat, steps, the job's failures. Out:
one root finding. A scheduler's end counts only when steps went on until then and nothing had failed
before; a lost node only when all that is known of its ranks stops at once without exit codes.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.finding import Finding
from playbooks.policy import SECOND
from playbooks.words import count, ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

_NS = 1_000_000_000
_REASONS = (
    ("time-limit", re.compile(r"TIME|DEADLINE", re.IGNORECASE)),
    ("preemption", re.compile(r"PREEMPT", re.IGNORECASE)),
    ("eviction", re.compile(r"EVICT", re.IGNORECASE)),
)
_LOST = ("slurm.node-failure", "k8s.node-not-ready", "elastic.heartbeat-lost")
_SPEAKS = ("train.", "rank.", "nccl.", "python.", "oom.", "gloo.", "elastic.")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A lost node before a cancelled job: schedulers cancel what a lost node leaves."""
    if evidence.run:
        return []
    lost = _lost(evidence, policy)
    if lost is not None:
        return [lost]
    ended = _ended(evidence, policy)
    return [] if ended is None else [ended]


def _at(row: dict[str, Any], fields: dict[str, Any]) -> int | None:
    """Time of a scheduler's line: it stands inside the text."""
    try:
        when = datetime.fromisoformat(str(fields.get("at")))
    except ValueError:
        when = None
    if when is None:
        return None if row["time_ns"] is None else int(row["time_ns"])
    return int(when.replace(tzinfo=when.tzinfo or UTC).timestamp()) * _NS


def _orders(evidence: Evidence) -> list[tuple[int | None, str, dict[str, Any]]]:
    """(time, reason, line) of everything that says that somebody ended the job."""
    out = []
    for row, fields in evidence.story.of("slurm.cancelled"):
        text = str(fields.get("reason") or "")
        if "NODE" not in text.upper():
            out.append((_at(row, fields), _reason(text), row))
    for row, fields in evidence.story.of("slurm.state"):
        if fields.get("state") in ("TIMEOUT", "PREEMPTED", "DEADLINE", "CANCELLED"):
            out.append((None, _reason(str(fields["state"])), row))
    for row, fields in evidence.story.of("k8s.terminated"):
        text = str(fields.get("message") or "").lower()
        if fields.get("reason") == "Evicted" and "memory" not in text and "storage" not in text:
            out.append((row["time_ns"], "eviction", row))
    for row, fields in evidence.story.of("elastic.death-signal"):
        if str(fields.get("signal_text")) in ("15", "SIGTERM"):
            out.append((row["time_ns"], "cancel", row))
    return sorted(out, key=lambda o: (o[0] is None, o[0] or 0, o[1] == "cancel"))


def _reason(text: str) -> str:
    return next((name for name, pattern in _REASONS if pattern.search(text)), "cancel")


def _ended(evidence: Evidence, policy: Policy) -> Finding | None:
    orders = _orders(evidence)
    named = [o for o in orders if o[2]["kind"] != "elastic.death-signal"]
    if not orders or not evidence.story.steps:
        return None
    times = [at for at, _, _ in orders if at is not None]
    if not times:
        return None
    at = min(times)
    if not _went_on(evidence, policy, at) or _failed_before(evidence, policy, at):
        return None
    reason, _row = (named or orders)[0][1:]
    last = evidence.story.steps[-1]
    words = {
        "time-limit": "at its time limit",
        "preemption": "by preemption",
        "eviction": "by eviction",
        "cancel": "by a cancel or a signal to the whole job",
    }[reason]
    items = [logs.item(o[2]) for o in (named or orders)[:3]]
    before = [s for s in evidence.story.steps if s[0] <= at]
    items += [logs.item((before or [last])[-1][2])]
    return Finding(
        "crash.scheduler-ended",
        "root",
        "certain" if named else "likely",
        f"The scheduler ended the job {words} while its steps went on; what ranks print after that "
        "is the shutdown.",
        where=reason,
        evidence=tuple(items[: policy.evidence_most]),
        excluded=(
            ("hang.rank-died", "all ranks were told to end together"),
            ("hang.rank-stalled", "steps went on until the signal"),
        ),
        at_ns=at,
    )


def _went_on(evidence: Evidence, policy: Policy, at: int) -> bool:
    """Whether the last progress line before `at` is not older than a few usual intervals."""
    before = [t for t, _, _ in evidence.story.steps if t <= at + policy.together_ns]
    gap = evidence.story.step_gap_ns
    if not before or gap is None:
        return False
    return at - before[-1] <= max(policy.count_silence * gap, 30 * SECOND)


def _failed_before(evidence: Evidence, policy: Policy, at: int) -> bool:
    failures = [
        r
        for r in evidence.story.failures
        if not r["kind"].startswith(("slurm.", "elastic.death", "elastic.signal"))
    ]
    timed = any(int(r["time_ns"]) < at - policy.together_ns for r in failures)
    return timed or any(r.kind.name == "memory" for r in evidence.raised)


def _lost(evidence: Evidence, policy: Policy) -> Finding | None:
    rows = [
        (row, fields)
        for row, fields in evidence.story.of(*_LOST, "slurm.state", "slurm.cancelled")
        if row["kind"] in _LOST
        or fields.get("state") == "NODE_FAIL"
        or "NODE" in str(fields.get("reason") or "").upper()
    ]
    if not rows:
        return None
    silent = _silent_sources(evidence)
    named = _named(evidence, rows)
    ranks = named or (set().union(*silent.values()) if len(silent) == 1 else set())
    ended = {e.rank for e in evidence.ends if e.signal or e.exit_code is not None}
    raised = {r.rank for r in evidence.raised}
    if ranks & (ended | raised):
        return None
    sure = [r for r in rows if r[0]["kind"] != "elastic.heartbeat-lost"]
    if not ranks and not sure:
        return None
    times = [t for row, fields in rows if (t := _at(row, fields)) is not None]
    quiet = [t for r in ranks if (t := _last(evidence, r)) is not None]
    items = [logs.item(row) for row, _ in (sure or rows)[:3]]
    items += [logs.item(row) for row, _ in rows if row["kind"] == "elastic.heartbeat-lost"][:1]
    who = f"{ranks_words(ranks)} on it fell" if ranks else "its ranks fell"
    return Finding(
        "crash.node-lost",
        "root",
        "certain" if ranks and sure and silent else "likely",
        f"A whole node was lost: {who} silent at once without exit codes, and "
        f"{count(len(rows), 'record')} of the scheduler or launcher says so.",
        ranks=tuple(sorted(ranks)),
        evidence=tuple(items[: policy.evidence_most]),
        excluded=(
            ("hang.rank-died", "every rank of that host went, not one"),
            ("link.nic-degraded", "the host did not answer its manager either"),
        ),
        at_ns=min([*quiet, *times], default=None),
    )


def _silent_sources(evidence: Evidence) -> dict[str, set[int]]:
    """Files with ranks whose lines stop, without any failure, before the others' failures."""
    failures = evidence.story.failures
    if not failures:
        return {}
    start = int(failures[0]["time_ns"])
    last: dict[str, int] = {}
    ranks: dict[str, set[int]] = {}
    for row in evidence.story.rows:
        if row["rank"] is None or not row["kind"].startswith(_SPEAKS):
            continue
        ranks.setdefault(row["source"], set()).add(row["rank"])
        if row["time_ns"] is not None:
            last[row["source"]] = max(last.get(row["source"], 0), int(row["time_ns"]))
    failed = {r["source"] for r in failures}
    out = {s: ranks[s] for s, at in last.items() if s not in failed and at < start}
    speaking = set().union(*(ranks[s] for s in ranks if s not in out))
    out = {s: some for s, some in out.items() if not some & speaking}
    if len(out) == 1:
        # Ranks that only greeted and were not heard since belong to the one that fell silent.
        source, some = next(iter(out.items()))
        for rank, row in evidence.rank_rows.items():
            seen = row["last_seen_ns"]
            if rank not in speaking and seen is not None and seen <= last[source]:
                some.add(rank)
    return out if len(out) < len(ranks) else {}


def _named(evidence: Evidence, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> set[int]:
    """Ranks on the nodes that the records name."""
    names = {
        str(f.get(k)).split(".")[0]
        for row, f in rows
        for k in ("host", "node")
        if f.get(k) and row["kind"] != "slurm.cancelled"
    }
    hosts: dict[str, set[int]] = {}
    for rank, host in evidence.hosts.items():
        hosts.setdefault(host.split(".")[0], set()).add(rank)
    out: set[int] = set()
    for name in names:
        for host, some in hosts.items():
            if name == host or name.startswith(f"{host}_"):
                out |= some
    return out


def _last(evidence: Evidence, rank: int) -> int | None:
    row = evidence.rank_rows.get(rank)
    return None if row is None else row["last_seen_ns"]
