"""Communication: what the host waited for on each axis, and who came last into collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

FORMULAS = {
    "exposed_comm": "per axis: time that the host waited for operations / (ranks * steps), s",
    "comm_in_flight": "per axis: sum of end - issue / (ranks * steps), s; overlaps count twice",
    "arrival_skew": "per collective: last issue - first issue over its members, s; late = last - "
    "median",
}


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:
    """Keys: collectives, exposed_comm {axis: s a step}, comm_in_flight, arrival_skew."""
    ledger = evidence.ledger
    waited, flying = _by_axis(evidence, policy)
    return {
        "collectives": len(ledger),
        "exposed_comm": waited,
        "comm_in_flight": flying,
        "arrival_skew": _skew(evidence, policy),
    }


def _by_axis(
    evidence: Evidence, policy: Policy
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """(waited, in flight) seconds a rank and step, of the operations inside measured steps."""
    line, ledger = evidence.timeline, evidence.ledger
    steady = line.steady(policy.warmup_steps)
    if steady.size == 0 or not len(ledger):
        return {}, {}
    inside = np.isin(ledger.step, line.steps[steady]) & (ledger.group >= 0)
    if not inside.any():  # a source without step numbers: go by time
        start = int(line.start_ns[:, steady].min())
        inside = (ledger.issue >= start) & (ledger.issue < int(line.end_ns[:, steady].max()))
        inside &= ledger.group >= 0
    axes = [evidence.groups[code].axis for code in range(len(ledger.group_ids))]
    names = sorted(set(axes))
    axis = np.array([names.index(a) for a in axes] or [0])[np.maximum(ledger.group, 0)]
    per = steady.size * len(line.ranks) * 1e9
    waited: dict[str, float | None] = {}
    flying: dict[str, float | None] = {}
    for number, name in enumerate(names):
        mine = inside & (axis == number)
        if not mine.any():
            continue
        wait = mine & (ledger.wait >= 0)
        both = mine & (ledger.issue >= 0) & (ledger.end >= ledger.issue)
        waited[name] = float(ledger.wait[wait].sum() / per) if wait.any() else None
        flown = (ledger.end - ledger.issue)[both].sum()
        flying[name] = float(flown / per) if both.any() else None
    return waited, flying


def _skew(evidence: Evidence, policy: Policy) -> dict[str, Any] | None:
    """Spread of arrivals, who came last how often, and the latest arrivals."""
    ledger = evidence.ledger
    found = ledger.arrivals
    if found.skew_ns.size == 0:
        return None
    ranks, times = np.unique(found.last_rank, return_counts=True)
    alone = np.bincount(found.last_rank, weights=found.alone_ns / 1e9)
    order = np.argsort(-alone[ranks], kind="stable")
    instances = ledger.instances
    worst = np.argsort(-found.late_ns, kind="stable")[: policy.skew_samples]
    return {
        "median_s": float(np.median(found.skew_ns) / 1e9),
        "p95_s": float(np.percentile(found.skew_ns, 95) / 1e9),
        "last": [
            {
                "rank": int(ranks[i]),
                "share": float(times[i] / found.skew_ns.size),
                "imposed_wait_s": float(alone[ranks[i]]),
            }
            for i in order[:8]
        ],
        "latest": [
            {
                "group": evidence.groups[int(instances.group[found.instance[i]])].label,
                "seq": int(instances.seq[found.instance[i]]),
                "rank": int(found.last_rank[i]),
                "late_s": float(found.late_ns[i] / 1e9),
            }
            for i in worst
        ],
    }
