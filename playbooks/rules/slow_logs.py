"""What sets the pace, from console logs and GPU queries: slow.gpu-throttled, straggler-compute,
straggler-input, data-bound.

In: progress lines, tables of phases by rank, samples of GPUs. Out: roots in jobs that progress.
Shares are of step time; a table's unit cancels out.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_INPUT = ("data", "load", "input")
_COMPUTE = ("fwd", "forward", "bwd", "backward", "compute")
_THERMAL, _BRAKE, _CAP = 0x20 | 0x40, 0x8 | 0x80, 0x4


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Throttling, stragglers, input: the narrow ones first."""
    if not evidence.lines.of("train.step", "train.breakdown", "gpu.sample"):
        return []
    slow, by_input = _breakdown(evidence, policy)
    found = _throttled(evidence, policy, slow)
    if not found and slow:
        found = [_straggler(evidence, slow, by_input)]
    return [*found, *_data(evidence, policy)]


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
    for event in evidence.lines.of("train.breakdown"):
        share = _input_share(event)
        if share is not None:
            shares[event.rank].append(share)
            events.append(event)
    reports = 1 if evidence.lines.of("train.breakdown") else policy.data_bound_steps
    known = {r: median(v) for r, v in shares.items() if len(v) >= reports}
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


def _input_share(event: Event) -> float | None:
    """Share of a rank's table row that its input takes; None without such a column."""
    phases = event.fields.get("phases")
    if not isinstance(phases, dict):
        return None
    parts = {k: float(v) for k, v in phases.items() if not k.startswith(("total", "step"))}
    data = [v for k, v in parts.items() if k.startswith(_INPUT)]
    whole = sum(parts.values())
    return sum(data) / whole if data and whole > 0 else None
