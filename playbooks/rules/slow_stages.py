"""Pipelines in logs: slow.stage-imbalance, slow.pipeline-bubble.

In: times of stages (per microbatch or per step), idle shares, the schedule as the configuration
tells it. Out: at most one root. Uneven stages come first: their idle time is no bubble.

    bubble = (p - 1) / (v * m + p - 1)      p stages, m microbatches, v virtual stages a rank

(1F1B, GPipe and interleaved; Narayanan et al. 2021, arXiv:2104.04473.)
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.breakdown import Part
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Imbalance, else the bubble."""
    stages = {int(k): v for k, v in evidence.breakdown.of("stage").items()}
    return _imbalance(evidence, policy, stages) or _bubble(evidence, policy, stages)


def _works(parts: list[Part]) -> float | None:
    """Median compute of a stage, else its busy share."""
    found = [c for p in parts if (c := p.compute) is not None]
    found = found or [s for p in parts if (s := p.shares.get("compute")) is not None]
    if not found:
        found = [1 - s for p in parts if (s := _idle(p)) is not None]
    return median(found) if found else None


def _idle(part: Part) -> float | None:
    """Share of the step that a stage stands still."""
    for told in (part.share("idle"), part.share("wait")):
        if told is not None:
            return told
    busy = part.shares.get("compute")
    return None if busy is None else 1 - busy


def _imbalance(evidence: Evidence, policy: Policy, stages: dict[int, list[Part]]) -> list[Finding]:
    works = {s: w for s, parts in stages.items() if (w := _works(parts)) is not None}
    if len(works) < 2:
        return []
    heavy = max(works, key=lambda s: works[s])
    rest = median(w for s, w in works.items() if s != heavy)
    if rest <= 0 or works[heavy] < policy.stage_uneven * rest:
        return []
    if not _whole_stage(stages, heavy, rest, policy):
        return []
    idle = {s: median(f) for s, parts in stages.items() if (f := _idles(parts))}
    others = [v for s, v in idle.items() if s != heavy]
    if heavy in idle and others and idle[heavy] >= median(others):
        return []  # what takes longer there is no work: it waits most itself
    ranks = tuple(sorted({p.who["rank"] for p in stages[heavy] if "rank" in p.who}))
    light = min(works, key=lambda s: works[s])
    predicted, formula = _predicted(evidence, len(works))
    more = ""
    if others and predicted is not None:
        more = (
            f"; the others stand idle {median(others):.0%}, the schedule predicts {predicted:.1%}"
        )
    who = f" (on all its ranks: {ranks_words(ranks)})" if ranks else ""
    name = "last" if heavy == max(works) else "first" if heavy == min(works) else ""
    return [
        root(
            "slow.stage-imbalance",
            "likely",
            f"Stage {heavy}{f', the {name} one,' if name else ''} works {works[heavy] / rest:.2f} "
            f"times as long as the typical stage{who}{more}.",
            [*(e for p in stages[heavy][:2] for e in p.events[:1]), *stages[light][0].events[:1]],
            ranks=ranks,
            excluded=(
                ("slow.pipeline-bubble", "one stage works longer and waits least"),
                ("slow.straggler-compute", "all ranks of the stage are slow"),
                ("slow.comm-exposed", "the others wait for the heavy stage"),
            ),
            formula=f"{works[heavy]:.4g} / median of other stages {rest:.4g}"
            + (f"; {formula}" if predicted is not None else ""),
        )
    ]


def _idles(parts: list[Part]) -> list[float]:
    return [i for p in parts if (i := _idle(p)) is not None]


def _whole_stage(stages: dict[int, list[Part]], heavy: int, rest: float, policy: Policy) -> bool:
    """Whether each rank of the stage that reports works longer, not one of them."""
    by_rank: dict[int, list[Part]] = {}
    for part in stages[heavy]:
        if "rank" in part.who:
            by_rank.setdefault(part.who["rank"], []).append(part)
    works = [w for parts in by_rank.values() if (w := _works(parts)) is not None]
    level = 1 + (policy.stage_uneven - 1) / 2
    return all(w >= level * rest for w in works)


def _predicted(evidence: Evidence, seen: int) -> tuple[float | None, str]:
    told = evidence.settings
    stages = int(told.number("pp") or seen or 0)
    batches = told.microbatches
    virtual = int(told.number("virtual") or 1)
    if stages < 2 or not batches:
        return None, ""
    value = (stages - 1) / (virtual * batches + stages - 1)
    product = f"{virtual} * {batches}" if virtual > 1 else f"{batches}"
    return value, f"({stages} - 1) / ({product} + {stages} - 1) = {value:.1%}"


def _measured(evidence: Evidence, stages: dict[int, list[Part]]) -> tuple[float | None, list[Part]]:
    """(typical idle share of a stage, the parts that tell it)."""
    told = [(i, p) for parts in stages.values() for p in parts if (i := _idle(p)) is not None]
    if not told:
        batches = evidence.settings.microbatches
        told = [
            (1 - batches * p.compute / p.step_s, p)
            for parts in stages.values()
            for p in parts
            if batches and p.compute and p.step_s and p.scaled
        ]
    if not told:
        for p in evidence.breakdown.overall:
            share = p.share("idle") or p.share("p2p")
            if share is not None:
                told.append((share, p))
    if not told:
        return None, []
    return median(i for i, _ in told), [p for _, p in told[:3]]


def _bubble(evidence: Evidence, policy: Policy, stages: dict[int, list[Part]]) -> list[Finding]:
    predicted, formula = _predicted(evidence, len(stages))
    measured, parts = _measured(evidence, stages)
    if predicted is None or measured is None or predicted < policy.bubble_share:
        return []
    if not 0.6 * predicted <= measured <= 1.35 * predicted + 0.02:
        return []
    told = evidence.settings
    lines = [e for n in ("pp", "microbatches") for e in told.events(n)[:1]]
    return [
        root(
            "slow.pipeline-bubble",
            "likely",
            f"The stages stand idle {measured:.0%} of the step, as the schedule predicts "
            f"({predicted:.0%} with {int(told.number('pp') or len(stages))} stages and "
            f"{told.microbatches} microbatches); no stage stands out.",
            [*lines, *(e for p in parts for e in p.events[:1])],
            excluded=(
                ("slow.stage-imbalance", "measured idle is what the formula predicts"),
                ("slow.straggler-compute", "idle is spread over all stages"),
                ("slow.comm-exposed", "idle lies between microbatches"),
            ),
            formula=f"{formula}; measured {measured:.1%}",
        )
    ]
