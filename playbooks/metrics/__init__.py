"""Numbers of a run, each with its formula: tables in, plain JSON-ready mappings out.

`measure(evidence, policy)` is `metrics` of diag.report/1. What a source cannot tell is None (or
absent in a mapping by rank), never 0. Steps are those that every rank finished, without warm-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from playbooks.metrics import communication, device_time, memory, phases, pipeline, steps, what_if

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:
    """All metrics of one job."""
    out: dict[str, Any] = {}
    for part in (steps, phases, communication, device_time, memory, pipeline, what_if):
        out.update(part.measure(evidence, policy))
    out["mfu"] = None
    out["formulas"] = {
        **steps.FORMULAS,
        **phases.FORMULAS,
        **communication.FORMULAS,
        **device_time.FORMULAS,
        **memory.FORMULAS,
        **pipeline.FORMULAS,
        **what_if.FORMULAS,
    }
    return out
