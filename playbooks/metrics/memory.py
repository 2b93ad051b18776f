"""Peak memory of each rank: of the device where it was sampled, and of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

FORMULAS = {
    "peak_memory": "largest sample of each rank, bytes: device (peak, else allocated), rss of the "
    "process",
}


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:  # noqa: ARG001  one signature
    """Keys: peak_memory {rank: {device, rss}}, in bytes, None where nothing was sampled."""
    data = evidence.collected
    rank = data.ints("memory", "rank")
    device = np.maximum(data.ints("memory", "peak"), data.ints("memory", "allocated"))
    rss = data.ints("memory", "rss")
    out: dict[str, dict[str, int | None]] = {}
    for one in np.unique(rank[rank >= 0]):
        mine = rank == one
        values = {"device": int(device[mine].max()), "rss": int(rss[mine].max())}
        out[str(int(one))] = {k: (None if v < 0 else v) for k, v in values.items()}
    return {"peak_memory": out}
