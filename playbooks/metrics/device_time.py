"""What the devices did, from traces of the profiler: parts of a whole that sum to 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

FORMULAS = {
    "device_time": "of the span from the first to the last kernel or copy of a trace: compute = "
    "|u compute|, exposed = |u communication u compute| - |u compute|, memory = |u all| - |u "
    "communication u compute|, idle = span - |u all|, each / span",
    "overlap": "|communication n compute| / |communication|",
}
PARTS = ("compute", "exposed", "memory", "idle")


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:  # noqa: ARG001  one signature
    """Key: device_time {trace: {compute, exposed, memory, idle, overlap, by_group}}; by rank, or by
    file where a trace does not say its rank. by_group: seconds busy and exposed, and a count."""
    out: dict[str, Any] = {}
    for event in evidence.lines.of("kineto.rank"):
        told = event.fields.get("device_us")
        span = told.get("span") if isinstance(told, dict) else None
        if not isinstance(told, dict) or not isinstance(span, int | float) or span <= 0:
            continue
        moves = float(told["communication"])
        one: dict[str, Any] = {part: float(told[part]) / span for part in PARTS}
        one["overlap"] = float(told["overlapped"]) / moves if moves > 0 else None
        one["by_group"] = {
            name: {
                "count": of["count"],
                "busy_s": of["busy"] / 1e6,
                "exposed_s": of["exposed"] / 1e6,
            }
            for name, of in told["by_group"].items()
        }
        out[str(event.row["source"]) if event.rank is None else str(event.rank)] = one
    return {"device_time": out or None}
