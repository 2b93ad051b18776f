"""Where each rank's step time goes: shares of phases that sum to 1, the rest being "other"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks.timeline import INPUT

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

FORMULAS = {
    "phase_shares": "time in the phase without phases nested in it / step time, summed over steps; "
    "other = 1 - the rest",
    "data_wait_share": "median over ranks of (data + h2d) / step time",
}


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:
    """Keys: phase_shares {rank: {phase: share}}, data_wait_share."""
    line = evidence.timeline
    steady = line.steady(policy.warmup_steps)
    if steady.size == 0 or not line.phases:
        return {"phase_shares": {}, "data_wait_share": None}
    spent = {name: matrix[:, steady].sum(axis=1) for name, matrix in line.phases.items()}
    named = sum(spent.values(), np.zeros(len(line.ranks)))
    # Phases may reach a little beyond their step: then their sum is the whole.
    whole = np.maximum(line.seconds[:, steady].sum(axis=1), named)
    shares: dict[str, dict[str, float]] = {}
    for row, rank in enumerate(line.ranks):
        if whole[row] <= 0:
            continue
        one = {name: float(values[row] / whole[row]) for name, values in spent.items()}
        one["other"] = one.get("other", 0.0) + max(0.0, 1.0 - sum(one.values()))
        shares[str(rank)] = one
    data = [sum(one.get(name, 0.0) for name in INPUT) for one in shares.values()]
    return {
        "phase_shares": shares,
        "data_wait_share": float(np.median(data)) if data else None,
    }
