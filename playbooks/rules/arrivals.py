"""Who comes last into collectives of a job that goes on: slow.straggler-compute, -input.

In: Flight Recorder dumps with ends of operations, or NCCL Inspector files. Out: at most one root. A
collective ends for all members at once, so the last one to come spends least in it; its own clock
measures that, so clocks of hosts need not agree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from playbooks.finding import Item
from playbooks.ledger import TOGETHER
from playbooks.rules.naming import root
from playbooks.words import ranks_words, seconds

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

_MOST = 20_000
"""Collectives of one group that are looked at."""


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """From dumps, else from Inspector files."""
    if evidence.run or evidence.stopped:
        return []
    return _dumps(evidence, policy) or _inspected(evidence, policy)


def _dumps(evidence: Evidence, policy: Policy) -> list[Finding]:
    ledger = evidence.ledger
    found = ledger.instances
    if not found.rows.size:
        return []
    together = np.array([op in TOGETHER for op in ledger.ops] or [False])
    columns: dict[int, list[dict[int, float]]] = defaultdict(list)
    for number in range(found.first.size):
        rows = found.rows_of(number)
        if rows.size < 2 or not together[ledger.op[rows]].all():
            continue
        begin = np.where(ledger.start[rows] >= 0, ledger.start[rows], ledger.issue[rows])
        spent = (ledger.end[rows] - begin) / 1e9
        if (begin < 0).any() or (ledger.end[rows] < 0).any() or (spent < 0).any():
            continue
        held = columns[int(found.group[number])]
        if len(held) < _MOST:
            held.append(dict(zip(ledger.rank[rows].tolist(), spent.tolist(), strict=True)))
    for code, held in columns.items():
        mine = (ledger.group == code) & (ledger.issue >= 0)
        whole = median(
            (ledger.end[own].max() - ledger.issue[own].min()) / 1e9
            for r in np.unique(ledger.rank[mine])
            if (own := mine & (ledger.rank == r)).any()
        )
        answer = _last(policy, held, float(whole))
        if answer is None:
            continue
        rank, text, formula = answer
        rows = np.flatnonzero(mine & (ledger.rank == rank))[:2]
        others = np.flatnonzero(mine & (ledger.rank != rank))[:1]
        items = [
            Item(c.source, c.locator, f"rank {c.rank}: {c.words()} #{c.seq}")
            for c in (ledger.call(int(r)) for r in (*rows, *others))
        ]
        return [_finding(evidence, policy, rank, text, formula, items)]
    return []


def _inspected(evidence: Evidence, policy: Policy) -> list[Finding]:
    events = {e.rank: e for e in evidence.lines.of("inspector.rank") if e.rank is not None}
    by: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for rank, event in events.items():
        groups = event.fields.get("groups")
        for key, values in groups.items() if isinstance(groups, dict) else ():
            if isinstance(values, list):
                by[key][rank] = [float(v) / 1e6 for v in values]
    for ranks in by.values():
        usual = Counter(len(v) for v in ranks.values()).most_common(1)[0][0]
        same = {r: v for r, v in ranks.items() if len(v) == usual}
        held = [dict(zip(same, column, strict=True)) for column in zip(*same.values(), strict=True)]
        whole = median((e.number("span_us") or 0.0) / 1e6 for e in events.values())
        answer = _last(policy, held, whole)
        if answer is not None:
            rank, text, formula = answer
            others = [e for r, e in sorted(events.items()) if r != rank]
            items = [e.item for e in (events[rank], *others[:2])]
            return [_finding(evidence, policy, rank, text, formula, items)]
    return []


def _last(
    policy: Policy, held: list[dict[int, float]], whole: float
) -> tuple[int, str, str] | None:
    """(rank, what it does, formula) of the rank that spends least in most collectives."""
    if len(held) < policy.straggler_steps or len(held[0]) < 3:
        return None
    last: Counter[int] = Counter()
    lost: list[float] = []
    for column in held:
        low = min(column, key=lambda r: column[r])
        rest = median(v for r, v in column.items() if r != low)
        if column[low] <= policy.short_kernel * rest:
            last[low] += 1
            lost.append(rest - column[low])
    if not last:
        return None
    rank, times = last.most_common(1)[0]
    share = sum(lost) / whole if whole > 0 else 0.0
    if times < policy.straggler_consistency * len(held) or share < policy.straggler_share / 2:
        return None
    own = median(c[rank] for c in held if rank in c)
    others = median(v for c in held for r, v in c.items() if r != rank)
    text = (
        f"it spends {seconds(own)} in a collective, the others {seconds(others)}, and is "
        f"the last in "
        f"{times} of {len(held)}"
    )
    return rank, text, f"sum of waits / time = {share:.0%}"


def _finding(
    evidence: Evidence, policy: Policy, rank: int, text: str, formula: str, items: list[Item]
) -> Finding:
    data = {
        r: median(v)
        for r, parts in evidence.breakdown.of("rank").items()
        if (v := [s for p in parts if (s := p.share("data")) is not None])
    }
    more = data.get(rank, 0.0) - median(data.values()) if data else 0.0
    by_input = more >= policy.straggler_share / 2
    return root(
        "slow.straggler-input" if by_input else "slow.straggler-compute",
        "likely",
        f"{ranks_words([rank], capital=True)} "
        f"{'waits for its data' if by_input else 'computes longer than its peers'}: {text}.",
        [],
        more=items,
        ranks=(rank,),
        excluded=(
            ("slow.comm-exposed", "the others wait for it inside collectives"),
            ("slow.work-imbalance", "the last rank does not change"),
            (
                "slow.straggler-input",
                f"its wait for data is {more:.0%} of the step above its peers'",
            ),
        )
        if not by_input
        else (("slow.straggler-compute", "its wait for data explains it"),),
        formula=formula,
    )
