"""One run against another at equal weights and data: which factor, of what, and what it follows.

In: losses, gradient norms and weights of several runs, or of a run and its reference. Out:
numeric.loss-scaling, microbatch-normalisation, gradient-reduction, reported-loss. A factor counts
when it is constant and equals a size in which the runs differ, and no other size in which they
differ explains it as well.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

from playbooks.measures.runs import Fit, Run, fit, typical
from playbooks.rules import numeric_classes, numeric_printed
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding, Item
    from playbooks.policy import Policy

_RANKS = ("dp", "world")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Classes of parameters, factors, what follows accumulation, the printed loss."""
    runs = evidence.measures.runs
    classes = numeric_classes.rule(evidence, policy)
    if len(runs) < 2:
        return classes
    pairs = list(combinations(runs[:40], 2))
    return (
        classes
        or _factor(pairs, policy)
        or _accumulation(pairs, policy)
        or numeric_printed.rule(pairs, evidence, policy)
    )


# --- factors -------------------------------------------------------------------------------------


def _explains(value: float, a: float | None, b: float | None, policy: Policy) -> bool:
    """Whether a ratio is b/a or a/b, for sizes that differ."""
    if not a or not b or a == b:
        return False
    return any(abs(value / r - 1) < policy.factor_close for r in (b / a, a / b))


def _size(run: Run, key: str) -> float | None:
    told = run.settings.get(key)
    if told is None and key == "dp":
        world = run.settings.get("world")
        model = math.prod(run.settings.get(k, 1) for k in ("tp", "pp", "cp"))
        told = world / model if world else None
    if told is None and key == "accumulation" and run.reference:
        return 1.0
    return told


def _factor(pairs: Sequence[tuple[Run, Run]], policy: Policy) -> list[Finding]:
    """A constant factor of all gradients, or of the loss, that is a ratio of sizes."""
    seen: list[tuple[float, Run, Run, Fit, str]] = []
    for one, other in pairs:
        gradient, loss = typical(one, other, "gradient"), typical(one, other, "loss")
        told = gradient or loss
        if told is None or told[1] > 3 * policy.factor_close:
            continue
        if gradient and loss and not _comparable(loss, gradient, policy):
            continue
        what = "all gradients" if gradient else "the loss"
        seen.append((told[0], one, other, told[2], what))
    gradients = [s for s in seen if s[4] == "all gradients"]
    seen = gradients or seen  # that the loss is equal says nothing against the gradients
    ranks = [s for s in seen if _by_ranks(s, policy)]
    micro = [s for s in seen if _explains(s[0], *_both(s, "accumulation"), policy)]
    both = [s for s in ranks if s in micro]
    ranks_only = [s for s in ranks if s not in both]
    micro_only = [s for s in micro if s not in both]
    against_ranks = [s for s in seen if _flat(s, policy) and _differs(s, "dp")]
    against_micro = [s for s in seen if _flat(s, policy) and _differs(s, "accumulation")]
    if (ranks_only or (both and against_micro)) and not against_ranks and not micro_only:
        return [_loss_scaling((ranks_only or both)[0], len(ranks), len(against_micro), policy)]
    if (micro_only or (both and against_ranks)) and not against_micro and not ranks_only:
        return [_microbatches((micro_only or both)[0])]
    return []


def _comparable(
    loss: tuple[float, float, Fit], gradient: tuple[float, float, Fit], policy: Policy
) -> bool:
    """Equal data and weights: the losses agree, or have the factor of the gradients, or any size's
    at the first step. Losses that merely resemble each other are of different runs."""
    ratio = loss[0]
    agree = abs(ratio - 1) < 4 * policy.equal_loss
    whole = max(ratio, 1 / ratio)
    return (
        agree
        or abs(ratio / gradient[0] - 1) < 3 * policy.factor_close
        or abs(whole - round(whole)) < 0.02
    )


_Seen = tuple[float, Run, Run, Fit, str]


def _both(seen: _Seen, key: str) -> tuple[float | None, float | None]:
    return _size(seen[1], key), _size(seen[2], key)


def _by_ranks(seen: _Seen, policy: Policy) -> bool:
    return any(_explains(seen[0], *_both(seen, key), policy) for key in _RANKS)


def _flat(seen: _Seen, policy: Policy) -> bool:
    return abs(seen[0] - 1) < policy.factor_close


def _differs(seen: _Seen, key: str) -> bool:
    a, b = _both(seen, key)
    return a is not None and b is not None and a != b


def _items(found: Fit) -> list[Item]:
    return [found.first[0].item, found.first[1].item]


def _loss_scaling(seen: _Seen, agreeing: int, flat: int, policy: Policy) -> Finding:
    ratio, _, _, found, what = seen
    key = next(k for k in _RANKS if _explains(ratio, *_both(seen, k), policy))
    a, b = _both(seen, key)
    also = f"; accumulation alone changes nothing ({count(flat, 'pair')})" if flat else ""
    return root(
        "numeric.loss-scaling",
        "likely",
        f"From {key} {a:g} to {b:g} {what} change by the factor {ratio:.4g} "
        f"({found.first[0].text} to {found.first[1].text}), so in {count(agreeing, 'pair')} of "
        f"runs{also}: the loss is summed or divided once too often over the ranks.",
        [],
        more=_items(found),
        excluded=(
            ("numeric.microbatch-normalisation", "the factor follows the number of ranks"),
            ("numeric.gradient-reduction", "all that was compared has the same factor"),
            ("numeric.reported-loss", "it is no matter of printing"),
            ("numeric.divergence", "it is there at the first step"),
        ),
        formula=f"{found.first[1].text} / {found.first[0].text} = {ratio:.4g}; "
        f"{key} {b:g} / {a:g} = {b / a if a and b else 0:.4g}",
    )


def _microbatches(seen: _Seen) -> Finding:
    ratio, _, _, found, what = seen
    a, b = _both(seen, "accumulation")
    return root(
        "numeric.microbatch-normalisation",
        "likely",
        f"From {a:g} to {b:g} microbatches {what} change by the factor {ratio:.4g} "
        f"({found.first[0].text} to {found.first[1].text}): the loss is not divided by their "
        "number.",
        [],
        more=_items(found),
        excluded=(
            ("numeric.loss-scaling", "the factor follows the number of microbatches"),
            ("numeric.gradient-reduction", "all that was compared has the same factor"),
            ("numeric.divergence", "it is there at the first step"),
        ),
        formula=f"{found.first[1].text} / {found.first[0].text} = {ratio:.4g}; "
        f"accumulation {b:g} / {a:g} = {b / a if a and b else 0:.4g}",
    )


def _accumulation(pairs: Sequence[tuple[Run, Run]], policy: Policy) -> list[Finding]:
    """Equal global batch, other accumulation: another loss from the first step on, steadily."""
    found: list[tuple[Run, Run, Fit]] = []
    for one, other in pairs:
        a, b = one.settings.get("accumulation"), other.settings.get("accumulation")
        if not a or not b or a == b:
            continue
        if any(one.settings.get(k) != other.settings.get(k) for k in ("dp", "world", "tp")):
            continue
        if not _same_batch(one, other):
            continue
        loss = next((f for n in one.names("loss") if (f := fit(one, other, "loss", n))), None)
        if loss is None or abs(loss.ratio - 1) < 2 * policy.equal_loss:
            continue
        steady = loss.points >= 5 and loss.signs >= 0.95 and loss.spread < abs(loss.ratio - 1)
        if steady or (loss.points < 5 and loss.spread < 1e-3):
            found.append((one, other, loss))
    if not found:
        return []
    one, other, loss = max(found, key=lambda f: (f[2].points, abs(f[2].ratio - 1)))
    a, b = one.settings["accumulation"], other.settings["accumulation"]
    return [
        root(
            "numeric.microbatch-normalisation",
            "likely",
            f"At an equal global batch the loss is {loss.first[0].text} with accumulation {a:g} "
            f"and {loss.first[1].text} with {b:g} at the first step, and stays "
            f"{abs(loss.ratio - 1):.1%} {'higher' if loss.ratio > 1 else 'lower'}: means over "
            "microbatches are averaged instead of tokens.",
            [],
            more=_items(loss),
            excluded=(
                ("numeric.loss-scaling", "the number of ranks is the same"),
                ("numeric.divergence", "it is there at the first step and steady"),
                ("numeric.gradient-reduction", "the loss itself differs"),
                ("numeric.reported-loss", "it follows the accumulation"),
            ),
            formula=f"loss ratio {loss.ratio:.4g} at accumulation {a:g} -> {b:g}, over "
            f"{count(loss.points, 'step')}",
        )
    ]


def _same_batch(one: Run, other: Run) -> bool:
    """Whether the global batch is told, or computed, to be equal."""
    a, b = (_global_batch(r) for r in (one, other))
    return a is not None and a == b


def _global_batch(run: Run) -> float | None:
    told = run.settings.get("global_batch")
    micro, steps = run.settings.get("micro_batch"), run.settings.get("accumulation")
    if told is None and micro and steps:
        return micro * steps
    return told
