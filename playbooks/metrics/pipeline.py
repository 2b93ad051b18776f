"""The pipeline bubble: what the schedule predicts and what the stages waited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks.columns import codes

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

FORMULAS = {
    "bubble": "predicted (p - 1) / (m + p - 1) for p stages and m microbatches (1F1B and GPipe; "
    "Narayanan et al. 2021, arXiv:2104.04473); measured: mean over ranks of the time waited for "
    "pp operations / step time",
}


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:
    """Key: bubble {stages, microbatches, predicted, measured}, None without a pipeline."""
    stages = len(set(evidence.stages.values()))
    if stages < 2:
        return {"bubble": None}
    batches = _microbatches(evidence)
    predicted = None if batches is None else (stages - 1) / (batches + stages - 1)
    return {
        "bubble": {
            "stages": stages,
            "microbatches": batches,
            "predicted": predicted,
            "measured": _waited(evidence, policy),
        }
    }


def _microbatches(evidence: Evidence) -> int | None:
    """Microbatches of a step: one more than the highest number of a forward."""
    data = evidence.collected
    phase, names = codes(data, "phases", "phase")
    batch = data.ints("phases", "microbatch")
    forward = np.isin(phase, [i for i, name in enumerate(names) if name == "forward"])
    known = batch[forward & (batch >= 0)]
    return int(known.max()) + 1 if known.size else None


def _waited(evidence: Evidence, policy: Policy) -> float | None:
    """Share of step time in which ranks waited for operations of pp groups."""
    line, ledger = evidence.timeline, evidence.ledger
    steady = line.steady(policy.warmup_steps)
    pipes = [code for code, group in evidence.groups.items() if group.axis == "pp"]
    mine = np.isin(ledger.group, pipes) & (ledger.wait >= 0)
    mine &= np.isin(ledger.step, line.steps[steady])
    whole = float(line.seconds[:, steady].sum())
    if steady.size == 0 or not mine.any() or whole <= 0:
        return None
    return float(ledger.wait[mine].sum() / 1e9 / whole)
