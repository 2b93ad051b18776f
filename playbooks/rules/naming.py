"""What rules over logs of machines, networks and configurations share: roots, and failure.

In: Evidence and lines. Out: findings, and whether the job failed or trained at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.finding import Confidence, Finding
from playbooks.lines import items

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Item
    from playbooks.lines import Event

_BROKEN = (
    "nccl.warn",
    "nccl.error",
    "nccl.timeout",
    "nccl.watchdog-terminated",
    "nccl.connect-failed",
    "nccl.completion-error",
    "gloo.timeout",
    "gloo.closed-by-peer",
    "gloo.connect-failed",
    "store.clients-missing",
    "store.connect-timeout",
    "elastic.rendezvous",
    "elastic.worker-exit",
    "elastic.failure",
    "slurm.task-exit",
    "mpi.exit",
)


def broke(evidence: Evidence) -> bool:
    """Whether any line says that the job failed. One that says it finished outweighs warnings."""
    if evidence.raised or any(e.signal or e.exit_code for e in evidence.ends):
        return True
    if evidence.lines.of("train.done") or evidence.finished_well:
        return False
    return bool(evidence.lines.of(*_BROKEN))


def progressed(evidence: Evidence) -> bool:
    """Whether training steps are on record."""
    return bool(evidence.lines.of("train.step")) or bool(evidence.collected.tables["steps"])


def root(
    cause: str,
    confidence: Confidence,
    summary: str,
    events: Sequence[Event],
    *,
    more: Sequence[Item] = (),
    ranks: Sequence[int] = (),
    excluded: Sequence[tuple[str, str]] = (),
    where: str | None = None,
    advice: Sequence[str] = (),
    formula: str | None = None,
) -> Finding:
    """A root finding whose time is that of the earliest of `events`."""
    times = [e.at_ns for e in events if e.at_ns is not None]
    return Finding(
        cause,
        "root",
        confidence,
        summary,
        ranks=tuple(sorted(set(ranks))),
        evidence=(*items(events, 5), *more),
        excluded=tuple(excluded),
        where=where,
        advice=tuple(advice),
        formula=formula,
        at_ns=min(times, default=None),
    )
