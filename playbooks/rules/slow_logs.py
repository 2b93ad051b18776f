"""What sets the pace, from console logs and GPU queries: slow.gpu-throttled, straggler-compute,
straggler-input, data-bound, checkpoint-stall, recompiles.

In: progress lines, tables of phases by rank, samples of GPUs, saves, recompiles. Out: roots.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import ranks_words, seconds

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_INPUT = ("data", "load", "input")
_COMPUTE = ("fwd", "forward", "bwd", "backward", "compute")
_THERMAL, _BRAKE, _CAP = 0x20 | 0x40, 0x8 | 0x80, 0x4


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Throttling, stragglers, input, saves, recompiles: the narrow ones first."""
    if not evidence.lines.of("train.step", "train.breakdown", "gpu.sample"):
        return []
    slow, by_input = _breakdown(evidence, policy)
    found = _throttled(evidence, policy, slow)
    if not found and slow:
        found = [_straggler(evidence, slow, by_input)]
    return [
        *found,
        *_data(evidence, policy),
        *_saves(evidence, policy),
        *_recompiles(evidence, policy),
    ]


# --- tables of phases by rank -----------------------------------------------------------------


def _times(evidence: Evidence, words: tuple[str, ...]) -> dict[int, float]:
    """Median over reports of the sum of a rank's columns of that sort."""
    found: dict[int, list[float]] = defaultdict(list)
    for event in evidence.lines.of("train.breakdown"):
        phases = event.fields.get("phases")
        rank = event.number("rank")
        if rank is None or not isinstance(phases, dict):
            continue
        values = [float(v) for k, v in phases.items() if k.startswith(words)]
        if values:
            found[int(rank)].append(sum(values))
    return {rank: median(values) for rank, values in found.items()}


def _breakdown(evidence: Evidence, policy: Policy) -> tuple[tuple[int, ...], bool]:
    """(ranks that lead all others, whether by input rather than by compute)."""
    compute, data = _times(evidence, _COMPUTE), _times(evidence, _INPUT)
    for times, by_input in ((compute, False), (data, True)):
        if len(times) < 4:
            continue
        typical = median(times.values())
        base = median(compute.values()) if compute else typical
        slow = [r for r, t in times.items() if t - typical >= policy.straggler_share * base]
        if slow and len(slow) * 4 <= len(times):
            return tuple(sorted(slow)), by_input
    return (), False


def _straggler(evidence: Evidence, slow: tuple[int, ...], by_input: bool) -> Finding:
    words = _INPUT if by_input else _COMPUTE
    times = _times(evidence, words)
    typical = median(times.values())
    own = max(times[r] for r in slow)
    mine = [e for e in evidence.lines.of("train.breakdown") if e.number("rank") in slow]
    what = "waits for its data" if by_input else "computes"
    return root(
        "slow.straggler-input" if by_input else "slow.straggler-compute",
        "likely",
        f"{ranks_words(slow, capital=True)} {what} {own / max(typical, 1e-9):.2f} times as long "
        f"as the typical rank in {len(mine)} reports.",
        mine,
        ranks=slow,
        excluded=(("slow.work-imbalance", "the slow rank does not change"),),
        formula=f"{own:g} / median {typical:g}",
    )


# --- throttling -------------------------------------------------------------------------------


def _reason(bits: int) -> str | None:
    if bits & _THERMAL:
        return "thermal"
    if bits & _BRAKE:
        return "power-brake"
    return "power-cap" if bits & _CAP else None


def _throttled(evidence: Evidence, policy: Policy, slow: tuple[int, ...]) -> list[Finding]:
    samples = [e for e in evidence.lines.of("gpu.sample") if (e.number("sm_clock") or 0) > 0]
    if len(samples) < 2:
        return []
    usual = median(e.number("sm_clock") or 0 for e in samples)
    idle = [
        e for e in samples if (u := e.number("utilization")) is not None and u < policy.gpu_idle
    ]
    out: list[tuple[Event, str]] = []
    for event in samples:
        reason = _reason(int(event.number("throttle") or 0))
        clock = event.number("sm_clock") or 0
        if event in idle or reason is None or clock > policy.throttled_clock * usual:
            continue
        if reason == "power-cap" and _at_limit(event, policy):
            continue
        out.append((event, reason))
    if not out or len(out) * 2 > len(samples):
        return []
    event, reason = out[0]
    ranks = _rank_of(evidence, [e for e, _ in out], slow)
    heat = event.number("temperature")
    extra = f" at {heat:g} degC" if heat is not None else ""
    sure: Confidence = "certain" if ranks and ranks == slow else "likely"
    index = int(event.number("index") or 0)
    return [
        root(
            "slow.gpu-throttled",
            sure,
            f"GPU {index} on {event.label} runs at {event.number('sm_clock'):g} MHz{extra} "
            f"({reason}), the others at {usual:g} MHz"
            + (f"; {ranks_words(ranks)} computes longer than all others." if ranks else "."),
            [e for e, _ in out],
            ranks=ranks,
            where=reason,
            excluded=(
                ("slow.straggler-compute", "a throttle reason and a lower clock are on record"),
                ("link.pcie-degraded", "kernels, not copies, are slower"),
            ),
            formula=f"{event.number('sm_clock'):g} / {usual:g} MHz",
        )
    ]


def _at_limit(event: Event, policy: Policy) -> bool:
    """A power cap with the draw at an unchanged limit is normal under load."""
    power, limit = event.number("power"), event.number("power_limit")
    default = event.number("power_default")
    lowered = default is not None and limit is not None and limit < default
    return not lowered and not (
        power is not None and limit is not None and power < policy.power_at_limit * limit
    )


def _rank_of(evidence: Evidence, events: list[Event], slow: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks on those GPUs: by NCCL's lines, else the slow ranks of that index on a node."""
    ranks = {
        rank
        for event in events
        for rank, process in evidence.nccl.of_rank.items()
        if process.host == event.host and process.gpu == event.number("index")
    }
    if ranks:
        return tuple(sorted(ranks))
    indices = {int(e.number("index") or 0) for e in evidence.lines.of("gpu.sample")}
    size = max(indices) + 1
    own = {int(e.number("index") or 0) for e in events}
    return tuple(r for r in slow if r % size in own)


# --- input ------------------------------------------------------------------------------------


def _data(evidence: Evidence, policy: Policy) -> list[Finding]:
    shares: dict[int | None, list[float]] = defaultdict(list)
    events: list[Event] = []
    for event in evidence.lines.of("train.step"):
        data, step = event.number("data_time"), event.number("step_time")
        if data is not None and step is not None and 0 <= data <= step and step > 0:
            shares[event.rank].append(data / step)
            events.append(event)
    known = {r: median(v) for r, v in shares.items() if len(v) >= policy.data_bound_steps}
    bound = [r for r, share in known.items() if share >= policy.data_bound_share]
    if not known or len(bound) <= policy.data_bound_ranks * len(known):
        return []
    typical = median(known.values())
    who = f"{len(bound)} of {len(known)} ranks wait" if len(known) > 1 else "The job waits"
    return [
        root(
            "slow.data-bound",
            "likely",
            f"{who} {typical:.0%} of each step for the next batch.",
            [*events[:3], *evidence.lines.of("gpu.sample")[:1]],
            excluded=(
                ("slow.straggler-input", "nearly all ranks wait, not one"),
                ("slow.host-bound", "the wait is for the batch"),
            ),
            formula=f"median of data time / step time = {typical:.0%}",
        )
    ]


# --- saves ------------------------------------------------------------------------------------


def _saves(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Gaps between progress lines that hold a save, against those that hold none."""
    saves = sorted(
        {e.at_ns or _line(e): e for e in evidence.lines.of("train.save")}.items(),
        key=lambda p: p[0],
    )
    steps = [
        e
        for e in evidence.lines.of("train.step")
        if e.at_ns is not None and e.number("step") is not None
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
        gap = ((following.at_ns or 0) - (one.at_ns or 0)) / 1e9
        low, high = int(one.number("step") or 0), int(following.number("step") or 0)
        if gap <= 0 or high <= low:
            continue
        inside = any(low <= s < high for s in at)
        times = [t for t, e in saves if e.at_ns is not None]
        inside = inside or any((one.at_ns or 0) <= t < (following.at_ns or 0) for t in times)
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
    if len(again) + len(limit) < policy.recompiles or len(timed) < 6:
        return []
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
