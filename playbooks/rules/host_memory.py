"""Host memory that ran out, as records of kernel, scheduler and orchestrator tell: oom.host.

In: memory kills on record, killed data workers, ends of processes. Out: one root finding for kills
that no rank's own end shows (a data worker, a pod, a whole step). A kill of a process that is not
known to be of this job is no evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.finding import Confidence, Finding
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

SIGKILL = 9


def records(evidence: Evidence) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Lines that say that memory ran out on a host, in a container or in a job step."""
    out = evidence.story.of(*logs.MEMORY_KILLS)
    for row, fields in evidence.story.of("k8s.terminated", "slurm.state", "slurm.task-exit"):
        killed = fields.get("reason") == "OOMKilled" or fields.get("out_of_memory") is True
        if killed or str(fields.get("state") or "").startswith("OUT_OF_ME"):
            out.append((row, fields))
    return out


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A recorded memory kill of something that belongs to the job."""
    if evidence.run or any(e.signal == SIGKILL for e in evidence.ends):
        return []  # the rule about ends reads the same records
    found = records(evidence)
    if not found:
        return []
    pids = evidence.story.pids
    workers = {
        fields.get("pid"): row
        for row, fields in evidence.story.of("dataloader.worker-killed")
        if fields.get("signal") in (None, SIGKILL)
    }
    ours = [(r, f) for r, f in found if f.get("pid") in pids or f.get("pid") in workers]
    general = [(r, f) for r, f in found if f.get("pid") is None]
    if not ours and not general:
        return []
    ranks = {pids[f["pid"]] for _r, f in ours if f["pid"] in pids}
    ranks |= {workers[f["pid"]]["rank"] for _r, f in ours if f["pid"] in workers}
    ranks |= {row["rank"] for row in workers.values()} if general and not ours else set()
    for _row, fields in general:
        tasks = fields.get("tasks")
        ranks |= set(tasks) if isinstance(tasks, list) else set()
    named = tuple(sorted(r for r in ranks if r is not None))
    rows = [r for r, _ in (ours or general)]
    times = [r["time_ns"] for r in rows if r["time_ns"] is not None]
    confidence: Confidence = "certain" if ours else "likely"
    who = f" of {ranks_words(named)}" if named else ""
    what = "a data worker" if workers else "a process"
    items = [logs.item(r) for r in rows[:3]] + [logs.item(r) for r in workers.values()][:2]
    return [
        Finding(
            "oom.host",
            "root",
            confidence,
            f"Host memory ran out and {what}{who} was killed for it.",
            ranks=named,
            where="data-workers" if workers else None,
            evidence=tuple(items[: policy.evidence_most]),
            excluded=(("hang.rank-died", "a record says memory"),),
            at_ns=min(times) if times else None,
        )
    ]
