"""Step time, tokens a second, loss: from the steps table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

FORMULAS = {
    "step_time_s": "median over steps of the longest rank's end - start, warm-up steps left out",
    "step_time_spread": "(90th - 10th percentile) / median of the same step times",
    "tokens_per_s": "sum of tokens over those steps / sum of their step times",
    "core_wait_share": "median over ranks of time that the training thread could run but waited "
    "for a core / step time",
}


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:
    """Keys: steps, steps_measured, step_time_s, step_time_spread, tokens_per_s, loss and
    core_wait_share."""
    line = evidence.timeline
    steady = line.steady(policy.warmup_steps)
    done = int(line.complete.any(axis=0).sum()) if line.ranks else 0
    out: dict[str, Any] = {
        "steps": done,
        "steps_measured": int(steady.size),
        "step_time_s": None,
        "step_time_spread": None,
        "tokens_per_s": None,
        "loss": _loss(evidence),
        "core_wait_share": None,
    }
    if steady.size == 0:
        return out
    seconds = line.seconds[:, steady].max(axis=0)
    middle = float(np.median(seconds))
    low, high = np.percentile(seconds, [10, 90])
    out["step_time_s"] = middle
    out["step_time_spread"] = float((high - low) / middle) if middle > 0 else None
    queued = line.queued[:, steady].sum(axis=1) / line.seconds[:, steady].sum(axis=1)
    known = queued[~np.isnan(queued)]
    if known.size:
        out["core_wait_share"] = float(np.median(known))
    tokens = line.tokens[steady]
    if not np.isnan(tokens).any() and float(seconds.sum()) > 0:
        out["tokens_per_s"] = float(tokens.sum() / seconds.sum())
    return out


def _loss(evidence: Evidence) -> dict[str, float] | None:
    """First and last loss that any rank knows."""
    loss = evidence.timeline.loss
    known = loss[~np.isnan(loss)]
    return {"first": float(known[0]), "last": float(known[-1])} if known.size else None
