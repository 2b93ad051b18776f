"""Experts that receive very different numbers of tokens: slow.expert-imbalance.

In: tokens of experts or of ep ranks, their share, their expert kernels, who waits. Out: at most one
root. The measure is max / mean over the experts (or ranks) of a report; a router that sends nearly
all to one expert is numeric.router-collapse and left to that rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from playbooks.rules.naming import root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.breakdown import Part
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


@dataclass
class Load:
    """Tokens of all units in one report."""

    tokens: dict[Any, float]
    parts: dict[Any, Part]
    events: list[Event]

    @property
    def ratio(self) -> float:
        """max / mean."""
        return max(self.tokens.values()) / max(mean(self.tokens.values()), 1e-12)

    @property
    def hot(self) -> Any:
        """The unit with most."""
        return max(self.tokens, key=lambda u: self.tokens[u])

    @property
    def collapsed(self) -> bool:
        """Whether most of the units get next to nothing."""
        typical = mean(self.tokens.values())
        idle = sum(v < 0.1 * typical for v in self.tokens.values())
        return idle * 2 > len(self.tokens) and self.ratio > 0.5 * len(self.tokens)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """By ep rank where that is told, by rank, else by expert."""
    for unit in ("ep", "rank", "expert"):
        loads = _loads(evidence, unit)
        if loads:
            return _judge(policy, unit, loads)
    return _routed(evidence, policy) or _told(evidence, policy)


def _loads(evidence: Evidence, unit: str) -> list[Load]:
    by = evidence.breakdown.of(unit)
    rows: dict[tuple[str, Any, Any], dict[Any, Part]] = defaultdict(dict)
    for key, own in by.items():
        for number, part in enumerate(p for p in own if "tokens" in p.values):
            if unit == "rank" and not _expert_part(part):
                continue
            place = (
                part.source,
                part.step if part.step is not None else number,
                part.who.get("layer"),
            )
            rows[place][key] = part
    out = []
    for parts in rows.values():
        if len(parts) > 1:
            tokens = {u: p.values["tokens"] for u, p in parts.items()}
            out.append(Load(tokens, parts, [e for p in parts.values() for e in p.events[:1]]))
    return out


def _expert_part(part: Part) -> bool:
    words = " ".join([*part.names.values(), *(e.item.quote for e in part.events[:1])]).lower()
    return "expert" in part.values or "expert" in words or "moe" in words or "routed" in words


def _judge(policy: Policy, unit: str, loads: list[Load]) -> list[Finding]:
    least = policy.expert_uneven if unit != "expert" else policy.expert_uneven_one
    uneven = [x for x in loads if x.ratio >= least and not x.collapsed]
    if len(uneven) * 2 <= len(loads):
        return []
    hot = Counter(x.hot for x in uneven)
    unit_hot, times = hot.most_common(1)[0]
    steady = times >= policy.straggler_consistency * len(uneven)
    if not steady and unit != "expert":
        return []
    cost = _cost(uneven, unit_hot)
    ratio = median(x.ratio for x in uneven)
    last = uneven[-1].ratio
    grew = f", {last:.2f} at the end" if last > 1.15 * uneven[0].ratio else ""
    ranks = (int(unit_hot),) if unit in ("ep", "rank") and steady else ()
    who = ranks_words(ranks, capital=True) if unit == "rank" else f"{unit} {unit_hot}"
    who = {"ep": f"Expert-parallel rank {unit_hot}", "expert": f"Expert {unit_hot}"}.get(unit, who)
    if not steady:
        who = "The hottest expert"
    hottest = uneven[-1].parts[uneven[-1].hot].events[:1] if uneven[-1].parts else []
    return [
        root(
            "slow.expert-imbalance",
            "likely" if len(uneven) > 1 or cost else "possible",
            f"{who} gets {ratio:.2f} times the mean number of tokens in {len(uneven)} of "
            f"{len(loads)} "
            f"reports{grew}{cost}.",
            [*hottest, *uneven[0].events[:3]],
            ranks=ranks,
            excluded=(
                ("numeric.router-collapse", "most experts still share the load"),
                ("slow.straggler-compute", "its time grows with its tokens"),
                ("slow.work-imbalance", "the excess is in expert layers"),
                ("slow.comm-exposed", "the others wait for the hot rank in the all-to-all"),
                ("slow.gpu-throttled", "time per token is equal"),
            ),
            formula=f"max / mean = {ratio:.2f}",
        )
    ]


def _cost(loads: list[Load], hot: Any) -> str:
    """What the imbalance costs, from kernels and waits; "" where neither is told."""
    kernels, waits = [], []
    for load in loads:
        own = load.parts.get(hot)
        rest = [p for u, p in load.parts.items() if u != hot]
        if own is None or not rest:
            continue
        mine = own.values.get("expert") or own.compute
        others = [v for p in rest if (v := p.values.get("expert") or p.compute)]
        if mine and others:
            kernels.append(mine / median(others))
        held = own.values.get("wait", own.values.get("a2a"))
        idle = [v for p in rest if (v := p.values.get("wait", p.values.get("a2a"))) is not None]
        if held is not None and idle and median(idle) > 2 * held:
            waits.append(median(idle))
    out = f"; its expert kernels take {median(kernels):.2f} times as long" if kernels else ""
    return out + ("; the others wait for it" if waits else "")


def _routed(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Elements that the all-to-alls of each profiled rank carried."""
    routed: dict[int, tuple[float, Event]] = {}
    for event in evidence.lines.of("kineto.rank"):
        messages = event.fields.get("messages")
        value = messages.get("routed") if isinstance(messages, dict) else None
        if event.rank is not None and isinstance(value, int | float) and value > 0:
            routed[event.rank] = (float(value), event)
    if len(routed) < 3:
        return []
    usual = mean(v for v, _ in routed.values())
    hot = max(routed, key=lambda r: routed[r][0])
    ratio = routed[hot][0] / usual
    if ratio < policy.expert_uneven:
        return []
    rest = [e for r, (_, e) in sorted(routed.items()) if r != hot]
    return [
        root(
            "slow.expert-imbalance",
            "likely",
            f"{ranks_words([hot], capital=True)} exchanges {ratio:.2f} times the mean amount in "
            "its all-to-alls.",
            [routed[hot][1], *rest[:2]],
            ranks=(hot,),
            excluded=(
                ("slow.straggler-compute", "it has more tokens than the others"),
                ("slow.comm-exposed", "the others wait for the hot rank in the all-to-all"),
                ("numeric.router-collapse", "the other ranks still get their share"),
            ),
            formula=f"max / mean = {ratio:.2f}",
        )
    ]


def _told(evidence: Evidence, policy: Policy) -> list[Finding]:
    """max / mean as the trainer prints it, or the largest share among so many experts."""
    found: list[tuple[float, Event]] = []
    for part in evidence.breakdown.parts:
        ratio = part.values.get("imbalance")
        quote = part.events[0].item.quote.lower() if part.events else ""
        if ratio is not None and ("expert" in quote or "moe" in quote or "token" in quote):
            found.append((ratio, part.events[0]))
    for event in evidence.lines.of("moe.load"):
        top, experts = event.number("top"), event.number("experts")
        if top is not None and experts and top < policy.collapsed_share / 2:
            found.append((top * experts, event))
    uneven = [(r, e) for r, e in found if r >= policy.expert_uneven_one]
    if len(uneven) < 3 or len(uneven) * 2 <= len(found):
        return []
    ratio = median(r for r, _ in uneven)
    return [
        root(
            "slow.expert-imbalance",
            "likely",
            f"The hottest expert gets {ratio:.2f} times the mean number of tokens in "
            f"{len(uneven)} of "
            f"{len(found)} reports.",
            [e for _, e in uneven[-3:]],
            excluded=(("numeric.router-collapse", "most experts still share the load"),),
            formula=f"max / mean = {ratio:.2f}",
        )
    ]
