"""Who sets the pace, from tables and lines that tell phases by rank or host:
slow.straggler-compute, slow.straggler-input, slow.work-imbalance.

In: Parts of ranks (or hosts, GPUs). Out: at most one root. In each report a unit's pace is its
compute and its wait for data; whoever leads the median of its peers by a share of the step makes
them wait.

    the same unit leads   its data explains it: straggler-input   else: straggler-compute
    leads, or changes,    and time follows tokens or squares of lengths: work-imbalance
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks.rules.naming import root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.breakdown import Part
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

WORK = ("sumsq", "tokens", "length", "samples")


@dataclass
class Report:
    """All units at one step."""

    parts: dict[Any, Part]
    pace: dict[Any, float]
    step: float

    def excess(self, unit: Any) -> float:
        """Seconds (or table units) beyond the median of the unit's peers."""
        stage = self.parts[unit].who.get("stage")
        peers = [
            v
            for u, v in self.pace.items()
            if u != unit and (stage is None or self.parts[u].who.get("stage") == stage)
        ]
        return self.pace[unit] - median(peers) if peers else 0.0


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The unit that leads its peers."""
    for unit in ("rank", "ranks", "host", "gpu"):
        reports = reports_of(evidence, unit)
        if reports:
            return _judge(evidence, policy, unit, reports)
    return []


# --- reports ----------------------------------------------------------------------------------


def _pace(part: Part) -> float | None:
    compute, data = part.compute, part.values.get("data")
    if compute is None and data is None:
        return None
    return (compute or 0.0) + (data or 0.0)


def reports_of(evidence: Evidence, unit: str) -> list[Report]:
    """Reports in which most units tell their compute or data; else their waits."""
    by = evidence.breakdown.of(unit)
    if len(by) < 2:
        return []
    rows: dict[tuple[str, int], dict[Any, Part]] = defaultdict(dict)
    for key, own in by.items():
        seen: Counter[tuple[str, int | None]] = Counter()
        for part in own:
            place = (part.source if part.step is None else "", part.step)
            number = seen[place] if part.step is None else part.step
            seen[place] += 1
            held = rows[place[0], number].get(key)
            if held is None:
                rows[place[0], number][key] = part
            else:  # another file or line of the same step
                held.values = {**part.values, **held.values}
    out = []
    for parts in rows.values():
        found = _report(parts)
        if found is not None and len(found.pace) * 3 >= 2 * len(by):
            out.append(found)
    return out


def _report(parts: dict[Any, Part]) -> Report | None:
    pace = {u: p for u, part in parts.items() if (p := _pace(part)) is not None}
    if len(pace) < 2 or not any(part.compute for part in parts.values()):
        waits = {u: w for u, part in parts.items() if (w := part.values.get("wait")) is not None}
        if len(waits) < 3:
            return None if len(pace) < 3 else _sized(parts, pace)
        most = max(waits.values())
        pace = {u: most - w for u, w in waits.items()}
    return _sized(parts, pace)


def _sized(parts: dict[Any, Part], pace: dict[Any, float]) -> Report | None:
    steps = [p.step_s for u, p in parts.items() if u in pace and p.step_s and p.scaled]
    if not steps and not any(part.compute for part in parts.values()):
        return None
    whole = median(steps) if steps else median(parts[u].total or pace[u] for u in pace)
    largest = max(pace.values())
    whole = max(whole, largest) if not steps or largest > 1.5 * whole else whole
    return Report(parts, pace, whole) if whole > 0 else None


# --- judgement --------------------------------------------------------------------------------


def _judge(evidence: Evidence, policy: Policy, unit: str, reports: list[Report]) -> list[Finding]:
    least = policy.straggler_share if len(reports) < 3 else policy.told_share
    marked: list[tuple[Report, Any]] = []
    for report in reports:
        leader = max(report.pace, key=report.excess)
        if report.excess(leader) >= least * report.step:
            marked.append((report, leader))
    if len(marked) * 2 < len(reports):
        return []
    with_it: Counter[Any] = Counter()
    for report, leader in marked:
        top = report.excess(leader)
        with_it.update(u for u in report.pace if report.excess(u) >= top / 2)
    usual = [u for u, n in with_it.items() if n >= policy.straggler_consistency * len(marked)]
    units = len({u for r in reports for u in r.pace})
    work = _work(reports)
    if work is not None:
        found = _by_work(evidence, policy, unit, marked, usual, work)
        if found:
            return [found]
    if not usual or len(usual) * 2 > units or (units == 2 and len(marked) < 3):
        return []
    found = _straggler(evidence, policy, unit, marked, usual)
    return [_as_stage(evidence, unit, units, found)]


def _as_stage(evidence: Evidence, unit: str, units: int, found: Finding) -> Finding:
    """All ranks of one stage, and no other: stages are blocks of consecutive ranks."""
    stages = int(evidence.settings.number("pp") or 1)
    size = units // stages if stages > 1 else 0
    ranks = sorted(found.ranks)
    if unit != "rank" or size < 2 or units % stages or found.cause != "slow.straggler-compute":
        return found
    if len(ranks) != size or ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
        return found
    stage = ranks[0] // size
    return found.but(
        cause="slow.stage-imbalance",
        summary=f"Stage {stage} of {stages}: {found.summary[0].lower()}{found.summary[1:]}",
        excluded=(
            ("slow.straggler-compute", "all ranks of the stage are slow, and no other"),
            ("slow.pipeline-bubble", "one stage works longer and waits least"),
            ("slow.comm-exposed", "the others wait for the heavy stage"),
        ),
    )


def _work(reports: list[Report]) -> str | None:
    """The measure of work whose differences between units are largest; None without one."""
    spread = {}
    for name in WORK:
        found = []
        for report in reports:
            values = [p.values[name] for p in report.parts.values() if name in p.values]
            if len(values) > 1 and min(values) > 0:
                found.append(max(values) / min(values))
        if found and median(found) > 1.1:
            spread[name] = median(found)
    return max(spread, key=lambda n: spread[n], default=None)


def _by_work(
    evidence: Evidence,
    policy: Policy,
    unit: str,
    marked: list[tuple[Report, Any]],
    usual: list[Any],
    work: str,
) -> Finding | None:
    pairs = [
        (p.values[work], c)
        for report, _ in marked
        for p in report.parts.values()
        if work in p.values and (c := p.compute) is not None
    ]
    if len(pairs) < 4:
        return None
    amount, compute = np.array(pairs).T
    if np.std(amount) == 0 or np.std(compute) == 0:
        return None
    follows = float(np.corrcoef(amount, compute)[0, 1])
    if follows < policy.work_follows:
        return None
    slope, base = np.polyfit(amount, compute, 1)
    leaders = Counter(leader for _, leader in marked)
    fixed = len(usual) == 1 and len(marked) > 2
    who = f"always {_name(unit, usual[0])}" if fixed else f"{len(leaders)} in turn"
    lost = median(r.excess(u) / r.step for r, u in marked)
    what = {"sumsq": "the sum of squared lengths", "length": "sequence length"}.get(work, work)
    events = [marked[0][0].parts[marked[0][1]].events[0]]
    events += [e for r, u in marked[1:4] for e in r.parts[u].events[:1]]
    return root(
        "slow.work-imbalance",
        "likely",
        f"Compute follows {what} on every {unit.removesuffix('s')} (correlation "
        f"{follows:.2f}); who "
        f"has most leads ({who}) by {lost:.0%} of the step, and the others wait.",
        events,
        ranks=_ranks(evidence, unit, usual) if fixed else (),
        where="sequence-length" if work in ("sumsq", "length") else "uneven-batch",
        excluded=(
            ("slow.straggler-compute", "time for equal work is equal on all ranks"),
            ("slow.comm-exposed", "the others wait for the one with most work"),
        ),
        formula=f"compute = {base:.3g} + {slope:.3g} * {work}, r = {follows:.2f}",
    )


def _straggler(
    evidence: Evidence,
    policy: Policy,
    unit: str,
    marked: list[tuple[Report, Any]],
    usual: list[Any],
) -> Finding:
    over, by_data, own, typical = [], [], [], []
    for report, _ in marked:
        for one in usual:
            if one not in report.pace:
                continue
            excess = report.excess(one)
            over.append(excess / report.step)
            own.append(report.pace[one])
            typical.append(report.pace[one] - excess)
            data = [p.values.get("data", 0.0) for u, p in report.parts.items() if u not in usual]
            more = report.parts[one].values.get("data", 0.0) - (median(data) if data else 0.0)
            by_data.append(more / excess if excess > 0 else 0.0)
    by_input = median(by_data) >= policy.straggler_cause_share
    ranks = _ranks(evidence, unit, usual)
    who = ranks_words(ranks, capital=True) if ranks else _name(unit, usual[0]).capitalize()
    waits = "wait for their data" if len(usual) > 1 or len(ranks) > 1 else "waits for its data"
    works = "compute" if len(usual) > 1 or len(ranks) > 1 else "computes"
    mine = [e for r, _ in marked for u in usual if u in r.parts for e in r.parts[u].events[:1]]
    other = next(u for u in marked[0][0].pace if u not in usual)
    return root(
        "slow.straggler-input" if by_input else "slow.straggler-compute",
        "likely",
        f"{who} {waits if by_input else works} "
        f"{median(own) / max(median(typical), 1e-9):.2f} times as long as the typical "
        f"{unit.removesuffix('s')} in {len(marked)} report{'s' * (len(marked) > 1)} "
        f"({median(over):.0%} of the step), and the others wait.",
        [*mine[:4], *marked[0][0].parts[other].events[:1]],
        ranks=ranks,
        excluded=(
            ("slow.work-imbalance", "the slow rank does not change, or its work is equal"),
            ("slow.comm-exposed", "the others wait for it inside collectives"),
            (
                "slow.straggler-compute" if by_input else "slow.straggler-input",
                f"the wait for data explains {max(median(by_data), 0):.0%} of the excess",
            ),
        ),
        formula=f"({median(own):.4g} - median of peers {median(typical):.4g}) / step = "
        f"{median(over):.0%}",
    )


def _name(unit: str, key: Any) -> str:
    if unit == "ranks":
        return f"ranks {key[0]}..{key[1]}"
    return f"{unit} {key}"


def _ranks(evidence: Evidence, unit: str, keys: list[Any]) -> tuple[int, ...]:
    """The ranks of these units, as far as anything tells."""
    if unit == "rank":
        return tuple(sorted(int(k) for k in keys))
    if unit == "ranks":
        return tuple(sorted(r for low, high in keys for r in range(low, high + 1)))
    if unit == "host":
        spans = {
            r
            for p in evidence.breakdown.parts
            if p.who.get("host") in keys
            for r in (
                range(p.who["ranks"][0], p.who["ranks"][1] + 1)
                if "ranks" in p.who
                else [p.who["rank"]]
                if "rank" in p.who
                else []
            )
        }
        return tuple(sorted(spans | {r for r, h in evidence.hosts.items() if h in keys}))
    size = evidence.world_size
    hosts = {p.who.get("host") for p in evidence.breakdown.parts}
    return tuple(sorted(int(k) for k in keys)) if size and len(hosts) == 1 else ()
