"""Cores and garbage: slow.cpu-affinity, slow.gc-pauses.

In: masks of processes, cores of hosts and NUMA nodes, waits for data; collections with their
durations, step times, who came last. Out: roots. A mask alone decides only where no step times were
given; beside them something must be slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median
from typing import TYPE_CHECKING

from collectors.readers.logs.host_lines import spans
from playbooks import words
from playbooks.rules.naming import root
from playbooks.rules.slow_last import named_last
from playbooks.words import count, ranks_words, seconds

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Masks, then pauses."""
    return [*_affinity(evidence, policy), *_garbage(evidence, policy)]


# --- masks ------------------------------------------------------------------------------------


def cores_of(event: Event) -> frozenset[int]:
    """The cores of a mask; empty where only their number is told."""
    spans = event.fields.get("cores")
    out: set[int] = set()
    for span in spans if isinstance(spans, list) else ():
        if isinstance(span, list) and len(span) == 2 and 0 <= span[1] - span[0] < 4096:
            out.update(range(int(span[0]), int(span[1]) + 1))
    return frozenset(out)


def _holders(masks: list[Event]) -> dict[tuple[str, int], Event]:
    """The processes that have a mask, each once."""
    out: dict[tuple[str, int], Event] = {}
    for event in masks:
        for key in ("task", "rank", "pid", "gpu"):
            value = event.number(key)
            if value is not None:
                out.setdefault((key, int(value)), event)
                break
    return out


def _affinity(evidence: Evidence, policy: Policy) -> list[Finding]:
    masks = evidence.lines.of("cpu.mask")
    if not masks:
        return []
    total = max((int(e.number("cores") or 0) for e in evidence.lines.of("cpu.total")), default=0)
    for event in evidence.lines.of("cpu.numa"):
        total = max(total, max(cores_of(event), default=-1) + 1)
    slow, how = _slowed(evidence, policy)
    if not slow:
        return []
    return (
        _collapsed(evidence, policy, masks, total, how)
        or _remote(evidence, masks, how)
        or _quota(evidence, policy, masks, how)
    )


def _slowed(evidence: Evidence, policy: Policy) -> tuple[bool, str]:
    """(whether anything measured is slow or nothing was measured, how)."""
    share = evidence.breakdown.typical("data")
    if share is None:
        told = [
            d / s
            for e in evidence.lines.of("train.step")
            if (d := e.number("data_time")) is not None and (s := e.number("step_time"))
        ]
        share = median(told) if told else None
    if share is not None and share >= policy.data_bound_share / 2:
        return True, f"; {share:.0%} of each step is a wait for data"
    late = evidence.breakdown.typical("host")
    if late is not None and late >= policy.host_share:
        return True, f"; {late:.0%} of each step is spent on the host"
    measured = evidence.breakdown.parts or evidence.lines.of("train.step")
    from playbooks.rules import slow_ranks

    if slow_ranks.rule(evidence, policy):
        return True, "; a rank with few cores is late"
    return (not measured, "")


def _collapsed(
    evidence: Evidence, policy: Policy, masks: list[Event], total: int, how: str
) -> list[Finding]:
    """The same few cores for many processes, or far fewer for some than for the others."""
    holders = _holders([e for e in masks if cores_of(e)])
    by: dict[frozenset[int], list[tuple[str, int]]] = defaultdict(list)
    for holder, event in holders.items():
        by[cores_of(event)].append(holder)
    if not by:
        single = [e for e in masks if cores_of(e)]
        by = {cores_of(e): [("process", 0)] for e in single[:1]}
        holders = {("process", 0): single[0]} if single else {}
    processes = _processes(evidence, holders)
    for cores, who in sorted(by.items(), key=lambda item: len(item[0])):
        sharing = max(len(who), processes if len(by) == 1 else 0)
        alike = len(cores) < policy.few_cores * max(sharing, 1)
        wide = max([len(c) for c in by] + [total])
        if not alike or wide < 4 * len(cores) or len(cores) > 64:
            continue
        ranks = [n for kind, n in who if kind in ("rank", "task")] if len(by) > 1 else []
        others = [len(c) for c in by if c != cores]
        versus = f"others have {max(others)}" if others else f"the host has {total}"
        event = holders[who[0]]
        return [
            root(
                "slow.cpu-affinity",
                "likely",
                f"{count(sharing, 'process')} may use only {count(len(cores), 'core')} "
                f"({_listed(cores)}), {versus}{how}.",
                [event, *(holders[w] for w in who[1:3]), *evidence.lines.of("cpu.total")[:1]],
                ranks=ranks if len(ranks) * 2 < len(holders) else (),
                where="collapsed-mask",
                excluded=_EXCLUDED,
                formula=f"{len(cores)} cores / {sharing} processes",
            )
        ]
    return []


_EXCLUDED = (
    ("slow.data-bound", "widening the mask, not faster storage, would help"),
    ("slow.host-bound", "the mask is too small"),
    ("slow.straggler-input", "the mask differs from that of good ranks, or is small on all"),
    ("slow.straggler-compute", "its mask differs from its peers'"),
)


def _processes(evidence: Evidence, holders: dict[tuple[str, int], Event]) -> int:
    """Processes that share the host: those with a mask, and their data workers."""
    ranks = sum(kind in ("rank", "task", "process") for kind, _ in holders) or 1
    workers = evidence.settings.number("workers") or 0
    return int(max(len(holders), ranks * (1 + workers)))


def _listed(cores: frozenset[int]) -> str:
    return words.spans(cores)


def _local(evidence: Evidence) -> dict[int, frozenset[int]]:
    """Cores near each GPU, as its topology or the host's NUMA nodes tell."""
    nodes = {int(e.number("node") or 0): cores_of(e) for e in evidence.lines.of("cpu.numa")}
    out: dict[int, frozenset[int]] = {}
    if len(evidence.collected.topologies) == 1:
        for gpu in evidence.collected.topologies[0].gpus:
            told = spans(gpu.cpu_affinity or "")
            if told:
                out[gpu.index] = frozenset(c for a, b in told for c in range(a, b + 1))
            elif gpu.numa is not None and gpu.numa in nodes:
                out[gpu.index] = nodes[gpu.numa]
    return out


def _remote(evidence: Evidence, masks: list[Event], how: str) -> list[Finding]:
    """Ranks whose cores lie on another NUMA node than their GPU."""
    local = _local(evidence)
    wrong = []
    for event in masks:
        index = event.number("rank")
        gpu = event.number("gpu") if event.number("gpu") is not None else index
        cores = cores_of(event)
        if gpu is not None and int(gpu) in local and cores and not cores & local[int(gpu)]:
            wrong.append((event, int(index if index is not None else gpu)))
    if not wrong or not how:
        return []
    return [
        root(
            "slow.cpu-affinity",
            "likely",
            f"{ranks_words([r for _, r in wrong], capital=True)} are bound to cores of "
            f"another NUMA "
            f"node than their GPU's{how}.",
            [e for e, _ in wrong[:3]],
            ranks=[r for _, r in wrong],
            where="remote-numa",
            excluded=_EXCLUDED,
        )
    ]


def _quota(evidence: Evidence, policy: Policy, masks: list[Event], how: str) -> list[Finding]:
    """A limit of cores that is smaller than the processes that share it."""
    told = [(n, e) for e in masks if not cores_of(e) and (n := e.number("count")) is not None]
    workers = evidence.settings.number("workers") or 0
    ranks = max(len(evidence.breakdown.of("rank")), 1)
    if not told or not how:
        return []
    few, event = min(told, key=lambda p: p[0])
    if few * policy.few_cores > ranks * (1 + workers):
        return []
    return [
        root(
            "slow.cpu-affinity",
            "likely",
            f"The job may use {few:g} cores for {ranks * (1 + workers):.0f} processes{how}.",
            [event, *evidence.settings.events("workers")[:1]],
            where="oversubscribed",
            excluded=_EXCLUDED,
            formula=f"{few:g} cores / {ranks * (1 + workers):.0f} processes",
        )
    ]


# --- garbage ----------------------------------------------------------------------------------


def _garbage(evidence: Evidence, policy: Policy) -> list[Finding]:
    pauses = [(s, e.rank, e) for e in evidence.lines.of("host.gc") if (s := e.number("seconds"))]
    for part in evidence.breakdown.parts:
        spent = part.values.get("gc")
        if spent and part.scaled and not any(e is p for _, _, p in pauses for e in part.events):
            told = part.who.get("rank")
            pauses.append((spent, told, part.events[0]))
    steps = _steps(evidence)
    if not pauses or len(steps) < 4:
        return []
    usual = median(steps)
    long = [p for p in pauses if p[0] >= max(policy.told_share * usual, 0.02)]
    lost = sum(s for s, _, _ in long)
    total = sum(steps)
    peaks = [s for s in steps if s >= usual + 0.6 * median([p[0] for p in long] or [usual])]
    if len(long) < 3 or lost < policy.gc_share * total or not peaks:
        return []
    ranks = Counter(r for _, r, _ in long if r is not None)
    if ranks and ranks.most_common(1)[0][1] >= policy.straggler_consistency * len(long) > 3:
        return []  # one rank that collects far more than the others has another reason
    last = [r for p, r, t in named_last(evidence) if t >= policy.told_share * usual]
    extra = ""
    if last:
        again = sum(r in ranks for r in last)
        extra = f"; the rank that collects is the last one in {again} of {len(last)} late steps"
    return [
        root(
            "slow.gc-pauses",
            "likely",
            f"{len(long)} collections of garbage of about "
            f"{seconds(median(s for s, _, _ in long))} on "
            f"{f'{len(ranks)} ranks in turn' if len(ranks) > 1 else 'the ranks'} take "
            f"{lost / total:.0%} of the time{extra}.",
            [e for _, _, e in long[:4]],
            excluded=(
                ("slow.straggler-compute", "the late rank changes"),
                ("slow.work-imbalance", "the pause is host time, not work"),
                ("slow.checkpoint-stall", "the pauses follow no interval of saves"),
                ("slow.comm-exposed", "the others wait for the rank that collects"),
                ("slow.host-bound", "the gaps are few and long"),
            ),
            formula=f"{seconds(lost)} / {seconds(total)} = {lost / total:.0%}",
        )
    ]


def _steps(evidence: Evidence) -> list[float]:
    """Seconds of each step, of the writer that tells most."""
    by: dict[object, list[float]] = defaultdict(list)
    for part in evidence.breakdown.parts:
        if part.step_s:
            by["part", part.source, str(part.who)].append(part.step_s)
    for event in evidence.lines.of("train.step"):
        took = event.number("step_time")
        if took:
            by["step", event.rank, event.row["source"]].append(took)
    if by:
        return max(by.values(), key=len)
    return _between(evidence)


def _between(evidence: Evidence) -> list[float]:
    """Seconds from each progress line to the next, of one step each."""
    clock: dict[object, dict[int, float]] = defaultdict(dict)
    for event in evidence.lines.of("train.step"):
        step = event.number("step")
        if step is not None and event.clock_s is not None:
            clock[event.rank, event.row["source"]].setdefault(int(step), event.clock_s)
    longest = max(clock.values(), key=len, default={})
    return [longest[s + 1] - at for s, at in sorted(longest.items()) if s + 1 in longest]
