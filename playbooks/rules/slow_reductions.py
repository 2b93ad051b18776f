"""Gradients reduced on every accumulation step: slow.sync-every-microstep.

In: all-reduces of a group in their order and sizes (Flight Recorder, run), or counts that a log
tells, and the accumulation that the job was set to. Out: at most one root. Buckets repeat in the
same order with each backward pass; what a step has only once (a norm, a loss) divides the steps:

    | b1 b2 b3 | b1 b2 b3 | b1 b2 b3 | loss |     3 passes of 3 buckets: K = 3, where 1 would do

With ZeRO-2, ZeRO-3 or full sharding a reduction a pass is by design.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from playbooks.finding import Item
from playbooks.rules.naming import root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

_SMALL = 4096
"""Bytes below which an all-reduce carries a number, not gradients."""
_LONGEST = 200_000


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:  # noqa: ARG001  one signature
    """From the ledger, else from counts."""
    if (evidence.settings.number("zero") or 0) >= 2 or evidence.settings.events("no_sync"):
        return []
    return _recorded(evidence) or _profiled(evidence) or _counted(evidence)


def passes(sizes: list[int]) -> tuple[int, int] | None:
    """(repetitions, operations of one) of a sequence that repeats as a whole, else None."""
    for length in range(1, len(sizes) // 2 + 1):
        if len(sizes) % length == 0 and sizes == sizes[:length] * (len(sizes) // length):
            return len(sizes) // length, length
    return None


def _recorded(evidence: Evidence) -> list[Finding]:
    ledger = evidence.ledger
    if not len(ledger) or ledger.pending.any():
        return []
    reduce = np.isin(ledger.op, [i for i, op in enumerate(ledger.ops) if op == "all_reduce"])
    told = evidence.settings.number("accumulation")
    for code, group in evidence.groups.items():
        if group.axis in ("tp", "pp", "cp", "ep"):
            continue
        mine = np.flatnonzero((ledger.group == code) & ~ledger.p2p & (ledger.seq >= 0))
        if mine.size < 8 or float(reduce[mine].mean()) < 0.9:
            continue
        counts = Counter(ledger.rank[mine].tolist())
        rank = min(counts, key=lambda r: (-counts[r], r))
        rows = mine[ledger.rank[mine] == rank][:_LONGEST]
        rows = rows[np.argsort(ledger.seq[rows], kind="stable")]
        found = _steps(ledger.bytes_in[rows].tolist(), told)
        if found is None:
            found = _by_time(evidence, rows, told)
        if found is None:
            continue
        times, buckets, steps, how = found
        if times < 2 or (told is not None and int(told) not in (1, times)):
            continue
        if buckets == 1 and told is None:
            continue
        first = ledger.call(int(rows[0]))
        last = ledger.call(int(rows[-1]))
        items = [
            Item(c.source, c.locator, f"{c.words()} #{c.seq} of {group.label}")
            for c in (first, last)
        ]
        words = f"{times} times the same {buckets} all-reduce{'s' * (buckets > 1)}"
        return [
            root(
                "slow.sync-every-microstep",
                "likely",
                f"Each optimizer step reduces gradients {words} in {group.label} ({steps} steps "
                f"{how}); {buckets} would do.",
                evidence.settings.events("accumulation")[:2],
                more=items,
                excluded=(
                    ("slow.comm-exposed", "the count, not the overlap, is wrong"),
                    ("hang.collective-extra", "all ranks issue the same operations"),
                    ("numeric.replicas-diverged", "replicas stay equal; it is only wasteful"),
                    ("link.nvlink-missing", f"1/{times} of the bytes would do"),
                ),
                formula=f"reductions a step = {times} * {buckets}",
            )
        ]
    return []


def _steps(sizes: list[int], told: float | None) -> tuple[int, int, int, str] | None:
    """(passes, buckets, steps) where a small operation ends each step; the ends may be cut off."""
    runs: list[list[int]] = [[]]
    for size in sizes:
        if 0 <= size < _SMALL:
            runs.append([])
        else:
            runs[-1].append(size)
    inner = [r for r in runs[1:-1] if r]
    found = [passes(r) for r in runs if r]
    good = [f for f in found if f is not None]
    if len(runs) < 2 or not good or sum(passes(r) is None for r in inner) > 0.2 * len(inner):
        return None
    (times, buckets), votes = Counter(good).most_common(1)[0]
    enough = votes >= 2 or (told is not None and times == int(told))
    return (times, buckets, votes, "told apart by a small operation") if enough else None


def _by_time(
    evidence: Evidence, rows: np.ndarray, told: float | None
) -> tuple[int, int, int, str] | None:
    """The same by the period of the buckets against the step time of the log."""
    ledger = evidence.ledger
    steps = [s for e in evidence.lines.of("train.step") if (s := e.number("step_time"))]
    sizes = ledger.bytes_in[rows].tolist()
    issue = ledger.issue[rows]
    if not steps or told is None or told < 2 or (issue < 0).any():
        return None
    for length in range(1, min(len(sizes) // 3, 512) + 1):
        begin = sizes[:length]
        if all(sizes[i : i + length] == begin for i in range(0, len(sizes) - length, length)):
            period = median(np.diff(issue[::length]) / 1e9)
            times = round(median(steps) / period) if period > 0 else 0
            if times == int(told):
                return times, length, len(sizes) // (length * times), "by step time"
            return None
    return None


def _profiled(evidence: Evidence) -> list[Finding]:
    """The same from all-reduces between the steps of a trace."""
    told = evidence.settings.number("accumulation")
    for event in evidence.lines.of("kineto.rank"):
        messages = event.fields.get("messages")
        reduces = messages.get("reduces") if isinstance(messages, dict) else None
        runs = [
            passes([n for n in sizes if n * 2 >= _SMALL])
            for sizes in (reduces.values() if isinstance(reduces, dict) else ())
        ]
        good = [found for found in runs if found is not None]
        if not good or len(good) < 0.8 * len(runs):
            continue
        (times, buckets), votes = Counter(good).most_common(1)[0]
        if told is None and (buckets < 2 or votes < 2):
            continue
        if told is not None and int(told) not in (1, times):
            continue
        return [
            root(
                "slow.sync-every-microstep",
                "likely",
                f"Each of {votes} profiled steps reduces the same {buckets} buckets {times} times; "
                "once would do.",
                [event, *evidence.settings.events("accumulation")[:1]],
                excluded=(
                    ("slow.comm-exposed", "the count, not the overlap, is wrong"),
                    ("numeric.replicas-diverged", "replicas stay equal; it is only wasteful"),
                ),
                formula=f"reductions a step = {times} * {buckets}",
            )
        ]
    return []


def _counted(evidence: Evidence) -> list[Finding]:
    """Reductions a step against buckets, as a log or profile counts them."""
    accumulation = evidence.settings.number("accumulation")
    for part in evidence.breakdown.parts:
        made, buckets = part.values.get("reductions"), part.values.get("buckets")
        buckets = buckets or _buckets(evidence)
        if not made or not buckets or made < 2 * buckets:
            continue
        times = made / buckets
        if abs(times - round(times)) > 0.05 or (accumulation and round(times) != accumulation):
            continue
        if not accumulation and "buckets" not in part.values:
            continue
        return [
            root(
                "slow.sync-every-microstep",
                "likely",
                f"Each optimizer step makes {made:g} gradient reductions of {buckets:g} "
                f"buckets: one "
                f"for each of {round(times)} accumulation steps.",
                [*part.events[:1], *evidence.settings.events("accumulation")[:1]],
                excluded=(("slow.comm-exposed", "the count, not the overlap, is wrong"),),
                formula=f"{made:g} = {round(times)} * {buckets:g}",
            )
        ]
    return []


def _buckets(evidence: Evidence) -> float | None:
    found = [b for p in evidence.breakdown.parts if (b := p.values.get("buckets"))]
    return found[0] if found else None
