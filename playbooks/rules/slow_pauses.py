"""Pauses between steps, from console logs: slow.checkpoint-stall, slow.recompiles.

In: progress lines with times, saves, timers, recompiles. Out: roots in jobs that progress. A pause
counts by the share of the time that it takes, never by its length alone.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import seconds

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Saves, then recompiles."""
    pauses = _saves(evidence, policy) or _timed(evidence, policy) or _told(evidence, policy)
    return [*pauses, *_recompiles(evidence, policy)]


def _pauses(evidence: Evidence, what: str) -> list[tuple[float, Event]]:
    """Every pause of a kind whose length is told, once a step."""
    told: dict[object, tuple[float, Event]] = {}

    def add(key: object, took: float | None, event: Event) -> None:
        if took is not None:
            told[key] = max(told.get(key, (0.0, event)), (took, event), key=lambda p: p[0])

    for event in evidence.lines.of("train.pause"):
        if event.text("what") == what:
            add(event.fields.get("step", event.item.locator), event.number("seconds"), event)
    if told:
        return list(told.values())
    for event in evidence.lines.of("train.timer"):
        if event.text("name").startswith("save" if what == "checkpoint" else "eval"):
            add(event.item.locator, event.number("seconds"), event)
    for part in evidence.breakdown.parts:
        if what in part.values and part.scaled and part.events:
            add(part.step or part.events[0].item.locator, part.values[what], part.events[0])
    return list(told.values())


def _series(evidence: Evidence) -> list[Event]:
    """Progress lines with steps, of the rank and file that has most."""
    by: dict[object, list[Event]] = defaultdict(list)
    for event in evidence.lines.of("train.step"):
        if event.number("step") is not None:
            by[event.rank, event.row["source"]].append(event)
    return max(by.values(), key=len, default=[])


def _told(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Saves or evaluations whose lines tell how long they took, against the time of the steps."""
    steps = _series(evidence)
    times = [t for e in steps if (t := e.number("step_time")) is not None]
    numbers = [int(e.number("step") or 0) for e in steps]
    clock = [t for e in steps if (t := e.clock_s) is not None]
    if len(steps) < 4:
        return []
    for what in ("checkpoint", "evaluation"):
        found = _pauses(evidence, what)
        pauses = [t for t, _ in found]
        lost = sum(pauses)
        if times:
            working = median(times) * (max(numbers) - min(numbers))
        else:
            working = max(clock) - min(clock) - lost if clock else 0.0
        usual = median(times) if times else working / max(max(numbers) - min(numbers), 1)
        if len(pauses) < 2 or working <= 0:
            continue
        share = lost / (lost + working)
        if share < policy.pause_share or median(pauses) < usual:
            continue
        return [
            root(
                "slow.checkpoint-stall",
                "likely",
                f"{len(pauses)} {what} pauses of about {seconds(median(pauses))} take "
                f"{share:.0%} of "
                "the time.",
                [e for _, e in found[:3]],
                where=what,
                excluded=(
                    ("slow.gc-pauses", f"the pauses are those of a {what}"),
                    ("hang.slow-not-dead", "no timeout expired"),
                    ("slow.data-bound", "steps between the pauses are even"),
                ),
                formula=f"{seconds(lost)} / ({seconds(lost)} + {seconds(working)}) = {share:.0%}",
            )
        ]
    return []


def _timed(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Where lines have no times: the trainer's own timer of saves, over their interval."""
    took = [
        t
        for e in evidence.lines.of("train.timer", "train.saved")
        if (e.kind == "train.saved" or "save" in e.text("name"))
        and (t := e.number("seconds")) is not None
    ]
    steps = [t for e in evidence.lines.of("train.step") if (t := e.number("step_time")) is not None]
    saves = evidence.lines.of("train.save", "train.saved")
    at = sorted({int(n) for e in saves if (n := e.number("step")) is not None})
    if len(took) < 2 or len(at) < 2 or len(steps) < 6:
        return []
    pause = median(took)
    between = median(b - a for a, b in pairwise(at)) * median(steps)
    share = pause / (pause + between)
    if share < policy.pause_share:
        return []
    return [
        root(
            "slow.checkpoint-stall",
            "likely",
            f"A save takes {seconds(pause)} after every {seconds(between)} of steps: {share:.0%} "
            "of the time.",
            [*saves[:2], *evidence.lines.of("train.timer")[:1]],
            where="checkpoint",
            excluded=(
                ("slow.gc-pauses", "the pauses follow the interval of saves"),
                ("hang.slow-not-dead", "no timeout expired"),
            ),
            formula=f"{seconds(pause)} / ({seconds(pause)} + {seconds(between)}) = {share:.0%}",
        )
    ]


# --- saves ------------------------------------------------------------------------------------


def _saves(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Gaps between progress lines that hold a save, against those that hold none."""
    saves = sorted(
        {e.clock_s or _line(e): e for e in evidence.lines.of("train.save", "train.mark")}.items(),
        key=lambda p: p[0],
    )
    steps = [
        e
        for e in evidence.lines.of("train.step")
        if e.clock_s is not None and e.number("step") is not None
    ]
    by_rank: dict[int | None, list[Event]] = defaultdict(list)
    for event in steps:
        by_rank[event.rank].append(event)
    series = max(by_rank.values(), key=len, default=[])
    if len(saves) < 2 or len(series) < 6:
        return []
    at = {int(n) for _, e in saves if (n := e.number("step")) is not None}
    paused: list[float] = []
    plain: list[float] = []
    for one, following in pairwise(series):
        gap = (following.clock_s or 0) - (one.clock_s or 0)
        low, high = int(one.number("step") or 0), int(following.number("step") or 0)
        if gap <= 0 or high <= low:
            continue
        inside = any(low <= s < high for s in at)
        times = [t for t, e in saves if e.clock_s is not None]
        inside = inside or any((one.clock_s or 0) <= t < (following.clock_s or 0) for t in times)
        inside = inside or any(
            e.row["source"] == one.row["source"] and _line(one) > _line(e) > _line(following)
            for _, e in saves
        )
        (paused if inside else plain).append(gap)
    if len(paused) < 2 or len(plain) < 3:
        return []
    pause = median(paused) - median(plain)
    total = sum(paused) + sum(plain)
    share = pause * len(paused) / total
    if share < policy.pause_share or pause < median(plain):
        return []
    what = "evaluation" if "valuat" in saves[0][1].text("what") else "checkpoint"
    return [
        root(
            "slow.checkpoint-stall",
            "likely",
            f"{len(paused)} {what} pauses of about {seconds(pause)} take {share:.0%} of the time.",
            [e for _, e in saves[:2]] + evidence.lines.of("train.timer")[:1],
            where=what,
            excluded=(
                ("slow.gc-pauses", "the pauses follow the interval of saves"),
                ("hang.slow-not-dead", "no timeout expired"),
                ("slow.data-bound", "steps between the pauses are even"),
            ),
            formula=f"{len(paused)} * {seconds(pause)} / {seconds(total)} = {share:.0%}",
        )
    ]


def _line(event: Event) -> int:
    digits = "".join(c for c in event.item.locator if c.isdecimal())
    return -int(digits[:12] or 0)


# --- recompiles -------------------------------------------------------------------------------


def _recompiles(evidence: Evidence, policy: Policy) -> list[Finding]:
    again = evidence.lines.of("compile.recompile")
    limit = evidence.lines.of("compile.limit")
    timed = [
        (t, e) for e in evidence.lines.of("train.step") if (t := e.number("step_time")) is not None
    ]
    timed = timed if len(timed) > len(again) else _gaps(evidence)
    if len(again) + len(limit) < policy.recompiles or len(timed) < 6:
        return _compiling(evidence, policy)
    usual = median(t for t, _ in timed)
    peaks = [(t, e) for t, e in timed if t >= policy.recompile_peak * usual]
    lost = sum(t - usual for t, _ in peaks)
    total = sum(t for t, _ in timed)
    if len(peaks) < 2 or lost < policy.pause_share * total:
        return []
    return [
        root(
            "slow.recompiles",
            "likely",
            f"torch.compile compiled again {len(again)} times after warm-up; {len(peaks)} steps "
            f"took {seconds(median(t for t, _ in peaks))} instead of {seconds(usual)}.",
            [*again[:2], *limit[:1], *(e for _, e in peaks[:2])],
            excluded=(
                ("slow.gc-pauses", "compile records coincide with the peaks"),
                ("slow.data-bound", "the wait is in a compiled region"),
                ("hang.slow-not-dead", "no timeout expired"),
            ),
            formula=f"{seconds(lost)} of {seconds(total)} in peaks = {lost / total:.0%}",
        )
    ]


def _gaps(evidence: Evidence) -> list[tuple[float, Event]]:
    """The time from each progress line to the next, where lines tell when they were written."""
    told = [(t, e) for e in _series(evidence) if (t := e.clock_s) is not None]
    return [(b - a, e) for (a, _), (b, e) in pairwise(told) if b >= a]


def _compiling(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Time in compilation that the phases of later steps tell."""
    parts = [p for p in evidence.breakdown.parts if "compile" in p.values and p.whole]
    late = [p for p in parts[2:] if p.values["compile"] >= policy.told_share * (p.whole or 0.0)]
    whole = sum(p.whole or 0.0 for p in parts[2:])
    lost = sum(p.values["compile"] for p in late)
    if len(late) < policy.recompiles or lost < policy.pause_share * whole:
        return []
    return [
        root(
            "slow.recompiles",
            "likely",
            f"{len(late)} of {len(parts)} reports after warm-up hold a compilation of about "
            f"{seconds(median(p.values['compile'] for p in late))}, {lost / whole:.0%} of the "
            "time.",
            [e for p in late[:4] for e in p.events[:1]],
            excluded=(
                ("slow.gc-pauses", "compile times coincide with the peaks"),
                ("slow.data-bound", "the time goes into compilation"),
            ),
            formula=f"{seconds(lost)} / {seconds(whole)} = {lost / whole:.0%}",
        )
    ]
