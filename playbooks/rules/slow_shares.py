"""What takes the time of every rank alike, from phases that logs tell: slow.offload-bound,
slow.comm-exposed, slow.host-bound, slow.data-bound.

In: typical shares of the step, settings, peak memory. Out: roots. A share says what is large; which
cause it is follows from what the job was set to do (offload, sharding, overlap) and from memory.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from playbooks.breakdown import COMM
from playbooks.rules.naming import root

if TYPE_CHECKING:
    from playbooks.breakdown import Part
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The narrow ones first; communication only where nobody is late."""
    if not evidence.breakdown.parts:
        return []
    return [
        *_offload(evidence, policy),
        *_exposed(evidence, policy),
        *_host(evidence, policy),
        *_data(evidence, policy),
    ]


def quotes(evidence: Evidence, *quantities: str) -> list[Event]:
    """The last lines that tell one of these, one of each kind of report."""
    out: list[Event] = []
    for part in reversed(evidence.breakdown.parts):
        if any(q in part.values or q in part.shares for q in quantities):
            out += part.events[:2]
        if len(out) >= 3:
            break
    return out[:3]


def median_share(parts: list[Part], *quantities: str) -> float | None:
    """Median share over the parts that tell one of these."""
    found = [
        s
        for p in parts
        if p.whole and any(q in p.values or q in p.shares for q in quantities)
        if (s := p.share(*quantities)) is not None
    ]
    return median(found) if found else None


def parts_of(evidence: Evidence) -> list[Part]:
    return [p for p in evidence.breakdown.parts if "stage" not in p.who and "ep" not in p.who]


# --- offload ----------------------------------------------------------------------------------


def _offload(evidence: Evidence, policy: Policy) -> list[Finding]:
    told = evidence.settings.events("offload")
    parts = parts_of(evidence)
    own = median_share(parts, "cpu_optimizer", "copy")
    optimizer = _cpu_step(parts)
    share = max(own or 0.0, optimizer or 0.0 if told else 0.0)
    named = any("cpu_optimizer" in p.values or "offload" in p.names.get("copy", "") for p in parts)
    if share < policy.offload_share or not (told or named):
        return []
    if _link_down(evidence):
        return []
    return [
        root(
            "slow.offload-bound",
            "likely",
            f"With states offloaded to the host, the optimizer on the CPU and copies "
            f"take {share:.0%} "
            "of the step.",
            [*told[:1], *quotes(evidence, "cpu_optimizer", "copy", "optimizer")],
            excluded=(
                ("slow.over-sharded", "offload itself is the cost"),
                ("slow.data-bound", "states are moved, not batches"),
                ("slow.host-bound", "the time goes into the optimizer and copies of states"),
                ("slow.comm-exposed", "the time is on the host, not in collectives"),
                ("link.pcie-degraded", "no PCIe link below its rating is on record"),
            ),
            formula=f"(CPU optimizer + copies) / step = {share:.0%}",
        )
    ]


def _cpu_step(parts: list[Part]) -> float | None:
    """Share of the optimizer, where the whole step or its other phases are told."""
    found = []
    for part in parts:
        time = part.values.get("optimizer")
        if time is None or not part.scaled:
            continue
        compute = part.compute
        if part.step_s:
            found.append(min(1.0, time / part.step_s))
        elif compute:
            found.append(time / (time + compute))
    return median(found) if found else None


def _link_down(evidence: Evidence) -> bool:
    """Whether a PCIe link under load is below what it can do."""
    for event in evidence.lines.of("gpu.sample"):
        for now, most in (("gen", "gen_max"), ("width", "width_max")):
            a, b = event.number(now), event.number(most)
            if a is not None and b is not None and a < b and now == "width":
                return True
    return False


# --- exposed communication --------------------------------------------------------------------


def _exposed(evidence: Evidence, policy: Policy) -> list[Finding]:
    parts = parts_of(evidence)
    share = median_share(parts, *COMM)
    if share is None or share < policy.exposed_share or not _together(parts, policy):
        return []
    off = evidence.settings.overlap_off
    said = any("exposed" in n or "not overlapped" in n for p in parts for n in p.names.values())
    compute = median_share(parts, "fwdbwd", "forward", "backward", "compute")
    if not off and not (said and compute is not None and compute >= share):
        return []
    sharded = evidence.settings.number("zero") == 3 and not off
    return [
        root(
            "slow.comm-exposed",
            "possible" if sharded else "likely",
            f"Communication that does not run behind compute takes {share:.0%} of the step on all "
            "ranks" + ("; overlap is switched off." if off else "."),
            [*off[:2], *quotes(evidence, *COMM)],
            where="overlap-off" if off else None,
            excluded=(
                ("slow.straggler-compute", "no rank is late"),
                ("slow.host-bound", "the time is inside collectives"),
            ),
            formula=f"exposed communication / step = {share:.0%}",
        )
    ]


def _together(parts: list[Part], policy: Policy) -> bool:
    """Whether no unit waits far less than the others: that one would be late."""
    by: dict[str, list[float]] = {}
    for part in parts:
        key = str({k: v for k, v in part.who.items() if k in ("rank", "host", "ranks")})
        share = part.share("wait", *COMM)
        if share is not None:
            by.setdefault(key, []).append(share)
        late = part.share("late")
        if late is not None and late > policy.told_share:
            return False
    typical = [median(v) for v in by.values()]
    return len(typical) < 2 or max(typical) - min(typical) < policy.told_share


# --- host and data ----------------------------------------------------------------------------


def _profiled(evidence: Evidence) -> tuple[float | None, float | None]:
    """(time on the CPU, time on the device) as torch.profiler sums them up below its table."""
    found: dict[str, float] = {}
    for event in evidence.lines.of("train.timing"):
        values = event.fields.get("values")
        for entry in values if isinstance(values, list) else ():
            name = str(entry[3]) if isinstance(entry, list) and len(entry) == 4 else ""
            if name.startswith("self") and "total" in name and isinstance(entry[1], float):
                found["cpu" if "cpu" in name else "device"] = entry[1]
    return found.get("cpu"), found.get("device")


def _host(evidence: Evidence, policy: Policy) -> list[Finding]:
    parts = parts_of(evidence)
    share = median_share(parts, "host")
    cpu, device = _profiled(evidence)
    if cpu and device is not None:
        launches = [s for p in parts if (s := p.shares.get("host")) is not None]
        busy = device / cpu > 1 - policy.host_share
        share = None if busy or not launches else max(launches)
    if share is None or share < policy.host_share or evidence.settings.events("offload"):
        return []
    data = median_share(parts, "data") or 0.0
    if data >= policy.data_bound_share / 2:
        return []
    return [
        root(
            "slow.host-bound",
            "likely",
            (
                f"Launching and synchronising on the host takes {share:.0%} of the step; the "
                f"device waits."
            ),
            quotes(evidence, "host", "compute"),
            excluded=(("slow.data-bound", f"data takes {data:.0%} of the step"),),
            formula=f"host / step = {share:.0%}",
        )
    ]


def _data(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Most ranks wait for their batch."""
    shares: dict[str, list[float]] = {}
    events: list[Event] = []
    for part in parts_of(evidence):
        share = part.share("data")
        if share is None or not 0 <= share <= 1:
            continue
        key = str({k: v for k, v in part.who.items() if k in ("rank", "host", "ranks")})
        shares.setdefault(key, []).append(share)
        events += part.events[:1] if share >= policy.data_bound_share else []
    told = {k: median(v) for k, v in shares.items()}
    bound = [k for k, v in told.items() if v >= policy.data_bound_share]
    if not told or len(bound) <= policy.data_bound_ranks * len(told):
        return []
    if len(told) == 1 and len(next(iter(shares.values()))) < 2 and not _summary(evidence):
        return []
    typical = median(told.values())
    who = f"{len(bound)} of {len(told)} ranks wait" if len(told) > 1 else "The job waits"
    return [
        root(
            "slow.data-bound",
            "likely",
            f"{who} {typical:.0%} of each step for the next batch.",
            [*events[:3], *evidence.lines.of("gpu.sample")[:1]],
            excluded=(
                ("slow.straggler-input", "nearly all ranks wait, not one"),
                ("slow.host-bound", "the wait is for the batch"),
                ("slow.comm-exposed", "the wait is for the batch"),
            ),
            formula=f"median of data time / step time = {typical:.0%}",
        )
    ]


def _summary(evidence: Evidence) -> bool:
    """Whether the only report sums up several phases of a step."""
    return any(len([q for q in p.values if q != "data"]) >= 2 for p in evidence.breakdown.parts)
