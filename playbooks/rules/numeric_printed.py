"""A printed loss that is not the loss: numeric.reported-loss.

In: pairs of runs, and distances of gradients that a check printed. Out: at most one finding: the
gradients agree, and the loss differs by a constant or by a whole factor from the first step on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.measures.runs import Run, fit, typical
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding, Item
    from playbooks.measures.values import Value
    from playbooks.policy import Policy


def _is_distance(value: Value) -> bool:
    """Whether a value says how far gradients are apart, or to what they agree."""
    if value.number is None or not re.search(r"(?i)grad", value.label):
        return False
    agrees = re.search(r"(?i)\b(?:match|agree|equal|identical)", value.label) is not None
    return value.quantity == "difference" or (agrees and abs(value.number) < 1e-2)


def _small_differences(evidence: Evidence) -> tuple[str, Item] | None:
    """(value, line) of the largest printed distance of gradients, when all are rounding."""
    told = [v for r in evidence.measures.rows for v in r.values if _is_distance(v)]
    if len(told) < 3 or any(abs(v.number or 0.0) > 1e-4 for v in told):
        return None
    worst = max(told, key=lambda v: abs(v.number or 0.0))
    return worst.texts[0], worst.row.item


def rule(pairs: Sequence[tuple[Run, Run]], evidence: Evidence, policy: Policy) -> list[Finding]:
    """Gradients agree and the printed loss does not, by a constant or by a whole factor."""
    for one, other in pairs:
        gradient = typical(one, other, "gradient")
        small = _small_differences(evidence) if gradient is None else None
        if small is not None:
            said = f"Gradients differ from the reference by {small[0]} at most"
        elif (
            gradient is None
            or gradient[2].points < 3
            or abs(gradient[0] - 1) > 1e-3
            or gradient[1] > 5e-3
        ):
            continue
        else:
            a, b = gradient[2].first
            said = f"Gradient norms agree ({a.text} and {b.text})"
        loss = next((f for n in one.names("loss") if (f := fit(one, other, "loss", n))), None)
        if loss is None:
            continue
        exact = loss.points >= 5 and loss.offset_spread < 0.1 * abs(loss.offset)
        least = 0.2 * policy.equal_loss if exact else 2 * policy.equal_loss
        if abs(loss.ratio - 1) < least:
            continue
        constant = loss.offset_spread < 0.1 * abs(loss.offset)
        whole = max(loss.ratio, 1 / loss.ratio) if loss.ratio > 0 else 0.0
        factor = loss.spread < 0.01 and abs(whole - round(whole)) < 0.02 and round(whole) > 1
        if not (constant or factor):
            continue
        how = f"the constant {loss.offset:.4g}" if constant else f"the factor {loss.ratio:.4g}"
        return [
            root(
                "numeric.reported-loss",
                "likely",
                f"{said}, while the printed loss differs by {how} from the first step on "
                f"({loss.first[0].text} and {loss.first[1].text}).",
                [],
                more=[loss.first[0].item, loss.first[1].item],
                where="aux-included" if constant else "wrong-average",
                excluded=(
                    ("numeric.loss-scaling", "gradients agree"),
                    ("numeric.microbatch-normalisation", "gradients agree"),
                    ("numeric.divergence", "the difference is constant from the first step"),
                    ("numeric.aux-loss-dead", "gradients agree with the reference"),
                ),
                formula=f"difference {loss.offset:.4g} +- {loss.offset_spread:.2g} over "
                f"{count(loss.points, 'step')}",
            )
        ]
    return []
