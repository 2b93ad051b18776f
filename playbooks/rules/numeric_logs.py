"""Numbers that go wrong in logs: numeric.nan, divergence, loss-scale-collapse, router-collapse,
resume-state.

In: losses, norms, scales, experts' shares, resumes. Out: at most one root of each. The order is
that of the taxonomy: a collapsed scale before non-finite values, values that left their trend
before what became non-finite after them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules import numeric_nan, numeric_scale
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_POINTS = 8
_WINDOW = 3


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Scale, then resume, then divergence, then non-finite values; experts apart."""
    points = series(evidence)
    scale = numeric_scale.rule(evidence, points, policy)
    collapsed = bool(scale) or any(r.kind.name == "scale" for r in evidence.raised)
    out = scale + _router(evidence, policy)
    resume = _resume(evidence)
    if collapsed or resume:
        return [*out, *resume]
    return out + (_divergence(evidence, points, policy) or numeric_nan.first(evidence, points))


def series(evidence: Evidence) -> list[Event]:
    """Progress lines with a loss that varies, of the rank that has most of them, by step."""
    by_rank: dict[object, list[Event]] = defaultdict(list)
    for event in evidence.lines.of("train.step"):
        if event.number("loss") is not None:
            by_rank[event.rank].append(event)
    if not by_rank:
        for event in evidence.measures.steps:
            by_rank[event.row["source"]].append(event)
    varied = [e for e in by_rank.values() if len({x.number("loss") for x in e}) > 1]
    longest = max(varied, key=len, default=[])
    steps: dict[float, Event] = {}
    for event in longest:
        step = event.number("step")
        steps.setdefault(numeric_scale.line(event) if step is None else step, event)
    return [steps[s] for s in sorted(steps)]


# --- trend ------------------------------------------------------------------------------------


def _smooth(values: list[float]) -> list[float]:
    return [median(values[max(0, i - 1) : i + _WINDOW - 1]) for i in range(len(values))]


def _restarts(evidence: Evidence, points: Sequence[Event]) -> bool:
    """Whether a file tells of a restart between two of its losses."""
    places = defaultdict(list)
    for event in points:
        places[event.row["source"]].append(numeric_scale.line(event))
    attempts: dict[str, set[int]] = defaultdict(set)
    for row in evidence.measures.rows:
        told = places.get(row.source)
        if told and told[0] <= row.line <= told[-1]:
            attempts[row.source].add(row.attempt)
    return any(len(seen) > 1 for seen in attempts.values())


def _divergence(evidence: Evidence, curve: list[Event], policy: Policy) -> list[Finding]:
    points = []
    for event in curve:
        if numeric_nan.bad(event):
            break
        points.append(event)
    resumed = evidence.lines.of("resume.from", "resume.none")
    if len(points) < _POINTS or resumed or _restarts(evidence, points):
        return []
    loss = _smooth([e.number("loss") or 0.0 for e in points])
    low = min(range(len(loss)), key=lambda i: loss[i])
    after = loss[low:]
    rise = median(after[-_WINDOW:]) - loss[low]
    noise = median(abs(b - a) for a, b in pairwise(loss))
    if len(after) <= policy.diverged_points or rise < policy.diverged_share * abs(loss[low]):
        return []
    if rise < 6 * noise or rise < 0.6 * (max(after) - loss[low]):
        return []
    norms = [e.number("grad_norm") for e in points]
    before, end = norms[low], norms[-1]
    grew = before is not None and end is not None and end >= 2 * before > 0
    if before is not None and end is not None and not grew:
        return []
    where = int(points[low].number("step") or 0)
    extra = f", the gradient norm from {before:.3g} to {end:.3g}" if grew else ""
    return [
        root(
            "numeric.divergence",
            "likely" if grew else "possible",
            f"The loss rises from {loss[low]:.4g} at step {where} to {loss[-1]:.4g}{extra}; all "
            "values are finite.",
            [points[low], points[-1]],
            excluded=(
                ("numeric.nan", "nothing was non-finite before the rise"),
                ("numeric.resume-state", "no resume is near"),
                ("numeric.loss-scale-collapse", "the loss scale did not fall to its floor"),
                ("crash.user-exception", "the values left their trend before the error"),
            ),
            formula=f"rise {rise:.3g} over noise {noise:.2g} in {count(len(after), 'report')}",
        )
    ]


# --- experts ----------------------------------------------------------------------------------


def _router(evidence: Evidence, policy: Policy) -> list[Finding]:
    layers: dict[int, list[Event]] = defaultdict(list)
    for event in evidence.lines.of("moe.load") or evidence.measures.loads:
        layer = event.number("layer")
        if layer is not None and event.number("top") is not None:
            layers[int(layer)].append(event)
    long = {n: e for n, e in layers.items() if len(e) >= _WINDOW}
    gone = [n for n, e in long.items() if all(_collapsed(x, policy) for x in e[-2:])]
    if not gone or len(gone) < min(2, len(long)):
        return []
    weights = [e for e in evidence.lines.of("config.value") if e.text("name") == "aux_coefficient"]
    bias = any(
        e.text("name") == "expert_bias" and e.number("value")
        for e in evidence.lines.of("config.value")
    )
    strong = [e for e in weights if (e.number("value") or 0) >= policy.balance_weight]
    if bias or strong:
        return []  # balanced by configuration: whether its gradient arrives is not on record
    last = [long[n][-1] for n in gone]
    top = median(e.number("top") or 0 for e in last)
    weight = f"; its balancing weight is {weights[0].number('value'):g}" if weights else ""
    return [
        root(
            "numeric.router-collapse",
            "likely" if weights else "possible",
            f"In {len(gone)} of {len(long)} layers one expert gets {top:.0%} of the tokens"
            f"{weight}.",
            [*weights[:1], *last[:2], long[gone[0]][0]],
            excluded=(
                ("slow.expert-imbalance", "it is no skew but a collapse of the choice"),
                ("numeric.aux-loss-dead", "no effective balancing is configured"),
                ("numeric.divergence", "the router, not the rate, left its range"),
            ),
        )
    ]


def _collapsed(event: Event, policy: Policy) -> bool:
    experts = event.number("experts") or 0
    return experts > 2 and (event.number("top") or 0) >= policy.collapsed_share


# --- resume -----------------------------------------------------------------------------------


def _resume(evidence: Evidence) -> list[Finding]:
    """Hosts or ranks that begin at different steps after a restart."""
    begins: dict[object, tuple[int, Event]] = {}
    for event in evidence.lines.of("resume.none"):
        begins[event.row["rank"], event.place] = (0, event)
    for event in evidence.lines.of("resume.from"):
        step = event.number("step")
        key = (event.row["rank"], event.place)
        if step is not None and begins.get(key, (0, event))[0] <= step:
            begins[key] = (int(step), event)
    steps = {s for s, _ in begins.values()}
    if len(begins) > 1 and len(steps) > 1:
        most = max(steps)
        behind = [e for s, e in begins.values() if s < most]
        ahead = [e for s, e in begins.values() if s == most]
        return [
            root(
                "numeric.resume-state",
                "certain" if 0 in steps else "likely",
                f"After the restart {ahead[0].label} begins at step {most}, {behind[0].label} at "
                f"step {min(steps)}: the checkpoint did not come back everywhere.",
                [*ahead[:2], *behind[:2]],
                excluded=(
                    ("numeric.resume-data", "the step itself differs, not the order of samples"),
                    ("numeric.replicas-diverged", "it begins at a restart"),
                    ("numeric.divergence", "the jump is at the resume"),
                ),
            )
        ]
    partial = evidence.lines.of("resume.partial")
    if partial and steps - {0}:
        return [
            root(
                "numeric.resume-state",
                "likely",
                f"After the restart not all state came back: {partial[0].text('what')[:100]}.",
                partial,
                excluded=(("numeric.divergence", "the jump is at the resume"),),
            )
        ]
    return []
