"""A mean of means: numeric.microbatch-normalisation shown within one step.

In: loss and number of tokens of each microbatch of a step, and the loss that was reported for it.
Out: at most one finding: the reported loss is the plain mean and not the mean over tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from playbooks.rules.naming import root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.measures.values import Row, Value
    from playbooks.policy import Policy

_TOKENS = re.compile(r"(?i)token|label|target|valid|num_items")
_CLOSE = 1e-3


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The first step whose reported loss can be told apart from the mean over tokens."""
    parts: dict[tuple[str, int, int | None], list[tuple[float, float, Row]]] = defaultdict(list)
    reported: dict[tuple[str, int, int | None], list[Value]] = defaultdict(list)
    for row in evidence.measures.rows:
        step = row.at("step")
        if step is None:
            continue
        loss = next((v for v in row.values if v.quantity == "loss" and v.number), None)
        tokens = next((v for v in row.values if _TOKENS.search(v.label) and v.number), None)
        key = (row.source, step, row.rank)
        if row.at("microbatch") is not None:
            if loss is not None and tokens is not None and loss is not tokens:
                parts[key].append((loss.number or 0.0, tokens.number or 0.0, row))
        elif loss is not None:
            reported[key].append(loss)
    for key, told in parts.items():
        weight = sum(n for _, n, _ in told)
        if len(told) < 2 or not weight:
            continue
        plain = sum(value for value, _, _ in told) / len(told)
        right = sum(value * n for value, n, _ in told) / weight
        if abs(plain - right) < 2 * policy.equal_loss * abs(right):
            continue
        for value in reported.get(key, []):
            if abs((value.number or 0.0) - plain) > _CLOSE * abs(plain):
                continue
            return [
                root(
                    "numeric.microbatch-normalisation",
                    "likely",
                    f"The loss of step {key[1]}, {value.texts[0]}, is the mean of its "
                    f"{len(told)} microbatches' means; over all {weight:.0f} tokens it is "
                    f"{right:.4f}.",
                    [],
                    more=[value.row.item, *(r.item for _, _, r in told[:2])],
                    excluded=(
                        ("numeric.loss-scaling", "no factor of ranks is involved"),
                        ("numeric.reported-loss", "the sum over tokens is what training needs"),
                        ("numeric.divergence", "it is there in a single step"),
                    ),
                    formula=f"mean of means {plain:.4f}; over tokens {right:.4f}",
                )
            ]
    return []
