"""Kineto traces of several ranks: slow.straggler-compute, straggler-input, data-bound.

In: durations of communication kernels by group and operation, compute, steps and waits for data of
each rank. Out: at most one root. A collective ends for all at once, so whoever came last has the
shortest kernel; that rank, over nearly all collectives, is the one that the others wait for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The rank that comes last, else input on most ranks."""
    found = evidence.lines.of("kineto.rank")
    traces = {e.rank: e for e in found if e.rank is not None}
    if not traces:
        # One process that was profiled alone says no rank; its own waits count all the same.
        return _data({0: found[0]}, policy) if len(found) == 1 else []
    return _last(traces, policy) or _data(traces, policy)


def _shares(traces: dict[int, Event]) -> dict[int, float]:
    """Share of step time in which each rank waits for data."""
    out = {}
    for rank, event in traces.items():
        steps, data = event.number("step_us"), event.number("data_us")
        if (
            steps is not None
            and data is not None
            and steps > 0
            and (event.number("steps") or 0) > 1
        ):
            out[rank] = data / steps
    return out


def _durations(traces: dict[int, Event]) -> dict[str, dict[int, list[float]]]:
    """Durations by group and operation, of ranks with equally many; sends and receives left out."""
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for rank, event in traces.items():
        groups = event.fields.get("groups")
        for key, values in groups.items() if isinstance(groups, dict) else ():
            plain = key.lower()
            if isinstance(values, list) and "send" not in plain and "recv" not in plain:
                found[key][rank] = [float(v) for v in values]
    out = {}
    for key, by_rank in found.items():
        usual = Counter(len(v) for v in by_rank.values()).most_common(1)[0][0]
        same = {r: v for r, v in by_rank.items() if len(v) == usual}
        if len(same) > 1 and usual:
            out[key] = same
    return out


def _last(traces: dict[int, Event], policy: Policy) -> list[Finding]:
    shortest: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    spent: dict[int, float] = defaultdict(float)
    for by_rank in _durations(traces).values():
        ranks = sorted(by_rank)
        for column in zip(*(by_rank[r] for r in ranks), strict=True):
            seen.update(ranks)
            low = min(column)
            if low <= policy.short_kernel * median(column):
                shortest[ranks[column.index(low)]] += 1
        for rank, values in by_rank.items():
            spent[rank] += sum(values)
    if not shortest:
        return []
    rank, times = shortest.most_common(1)[0]
    share = times / seen[rank]
    others = [v for r, v in spent.items() if r != rank]
    if times < policy.straggler_steps or share < policy.straggler_consistency or not others:
        return []
    if spent[rank] > policy.short_kernel * median(others):
        return []
    steps = traces[rank].number("step_us") or 0
    lost = median(others) - spent[rank]
    if steps > 0 and lost < policy.straggler_share / 2 * steps:
        return []
    data = _shares(traces)
    more = data.get(rank, 0.0) - median(data.values()) if data else 0.0
    by_input = steps > 0 and more * steps >= policy.straggler_cause_share * lost
    what = "waits for its data" if by_input else "computes longer than its peers"
    rest = [e for r, e in sorted(traces.items()) if r != rank]
    return [
        root(
            "slow.straggler-input" if by_input else "slow.straggler-compute",
            "likely",
            f"{ranks_words([rank], capital=True)} {what}: it comes last into {share:.0%} of "
            f"{seen[rank]} collectives and spends {spent[rank] / 1e3:.1f} ms in them, the others "
            f"{median(others) / 1e3:.1f} ms.",
            [traces[rank], *rest[:3]],
            ranks=(rank,),
            excluded=(
                ("slow.comm-exposed", "the others wait for it inside collectives"),
                ("slow.work-imbalance", "the last rank does not change"),
            ),
            formula=f"shortest kernel in {times} of {seen[rank]}",
        )
    ]


def _data(traces: dict[int, Event], policy: Policy) -> list[Finding]:
    shares = _shares(traces)
    bound = [r for r, s in shares.items() if s >= policy.data_bound_share]
    if not shares or len(bound) <= policy.data_bound_ranks * len(shares):
        return []
    typical = median(shares.values())
    return [
        root(
            "slow.data-bound",
            "likely",
            f"{len(bound)} of {len(shares)} profiled ranks wait {typical:.0%} of each step for "
            "their batch.",
            [traces[r] for r in bound[:4]],
            excluded=(("slow.straggler-input", "nearly all ranks wait, not one"),),
            formula=f"DataLoader __next__ / ProfilerStep = {typical:.0%}",
        )
    ]
