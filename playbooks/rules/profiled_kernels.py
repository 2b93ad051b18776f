"""What one rank's kernels say when all ranks are alike: slow.comm-exposed, slow.host-bound,
slow.offload-bound.

In: what each device did and how its kernels were launched (kineto_kernels, kineto_gaps). Out: at
most one root. Exposed communication is |union(comm) - union(compute)|; the host is the limit where
the device stands idle and each next kernel was launched after the one before had ended.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from playbooks.rules.naming import root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Copies, gaps, then communication."""
    traces = [e for e in evidence.lines.of("kineto.rank") if _part(e, "device_us", "span") > 0]
    if not traces:
        return []
    return (
        _copies(evidence, policy, traces)
        or _gaps(policy, traces)
        or _exposed(evidence, policy, traces)
    )


def _part(event: Event, table: str, name: str) -> float:
    """A number of one of the trace's tables; 0 where it has none."""
    told = event.fields.get(table)
    value = told.get(name) if isinstance(told, dict) else None
    return float(value) if isinstance(value, int | float) else 0.0


def _share(traces: list[Event], name: str, table: str = "device_us") -> tuple[float, float]:
    """(median, smallest) share of the stretch over the ranks."""
    found = [_part(e, table, name) / _part(e, "device_us", "span") for e in traces]
    return median(found), min(found)


def _data(traces: list[Event]) -> float:
    found = [
        (e.number("data_us") or 0.0) / s for e in traces if (s := e.number("step_us") or 0.0) > 0
    ]
    return median(found) if found else 0.0


def _copies(evidence: Evidence, policy: Policy, traces: list[Event]) -> list[Finding]:
    share, least = _share(traces, "memory")
    offload = evidence.settings.events("offload")
    ways = [_ways(e) for e in traces]
    both = all(
        min(way) >= policy.told_share * _part(e, "device_us", "span")
        for way, e in zip(ways, traces, strict=True)
    )
    if least < policy.offload_share or not (offload or both):
        return []
    return [
        root(
            "slow.offload-bound",
            "likely",
            f"Copies between host and device that nothing hides take {share:.0%} of the time on "
            f"{len(traces)} profiled ranks.",
            [*offload[:1], *traces[:3]],
            excluded=(("slow.comm-exposed", "copies, not collectives, take the time"),),
            formula=f"(copies without kernels) / stretch = {share:.0%}",
        )
    ]


def _ways(event: Event) -> tuple[float, float]:
    """Time of copies to and from the device: batches go one way only."""
    messages = event.fields.get("messages")
    copies = messages.get("copies") if isinstance(messages, dict) else None
    told = copies if isinstance(copies, dict) else {}
    return float(told.get("HtoD", 0.0)), float(told.get("DtoH", 0.0))


def _gaps(policy: Policy, traces: list[Event]) -> list[Finding]:
    late, least = _share(traces, "late", "gaps_us")
    data = _data(traces)
    if least < policy.host_share or data >= policy.data_bound_share / 2:
        return []
    idle, _ = _share(traces, "idle")
    length = median(_part(e, "gaps_us", "kernel") for e in traces)
    syncs = median(_part(e, "gaps_us", "syncs") for e in traces)
    steps = max(median(e.number("steps") or 1.0 for e in traces), 1.0)
    how = "sync-points" if length > policy.long_kernel else "launch-bound"
    return [
        root(
            "slow.host-bound",
            "likely",
            f"The device stands idle {idle:.0%} of the time, {late:.0%} before kernels that were "
            f"launched only when it had run dry; the median kernel takes {length:.0f} us, and "
            f"{syncs / steps:.0f} synchronisations fall into a step.",
            traces[:4],
            where=how,
            excluded=(
                ("slow.data-bound", f"waits for data take {data:.0%}"),
                ("slow.comm-exposed", "the device is idle, not communicating"),
                ("slow.straggler-compute", "all profiled ranks are alike"),
                ("slow.gc-pauses", "the gaps are many and small"),
            ),
            formula=f"idle before late launches / stretch = {late:.0%}",
        )
    ]


def _exposed(evidence: Evidence, policy: Policy, traces: list[Event]) -> list[Finding]:
    share, least = _share(traces, "exposed")
    compute, _ = _share(traces, "compute")
    if least < policy.exposed_share or compute < share or not _alike(traces, policy):
        return []
    off = evidence.settings.overlap_off
    hidden = [
        1 - _part(e, "device_us", "exposed") / moved
        for e in traces
        if (moved := _part(e, "device_us", "communication")) > 0
    ]
    overlap = median(hidden) if hidden else 0.0
    # Collectives one after another could each have run behind compute; one between two pieces of
    # compute may be what the second waits for.
    row = median(
        _part(e, "gaps_us", "comm_kernels") / (_part(e, "gaps_us", "comm_runs") or 1)
        for e in traces
    )
    few = median(_part(e, "gaps_us", "comm_runs") / max(e.number("steps") or 1, 1) for e in traces)
    apart = (
        row >= policy.comm_row or few <= 1
    )  # one stretch a step: nothing waits for it but the end
    if not off and (overlap > policy.hidden_share or not apart):
        return []
    by_design = (evidence.settings.number("zero") or 0) == 3 and not off
    return [
        root(
            "slow.comm-exposed",
            "possible" if by_design else "likely",
            f"{share:.0%} of the time is communication with no compute beside it, on all "
            f"{len(traces)} profiled ranks; {overlap:.0%} of the communication is hidden"
            + (", and overlap is switched off." if off else "."),
            [*off[:2], *traces[:3]],
            where="overlap-off" if off or overlap < 0.1 else None,
            excluded=(
                ("slow.straggler-compute", "members of each collective take equally long"),
                ("slow.host-bound", "the device is communicating, not idle"),
                ("link.internode-too-slow", "compute is long enough to hide it"),
            ),
            formula=f"|union(comm) - union(compute)| / stretch = {share:.0%}",
        )
    ]


def _alike(traces: list[Event], policy: Policy) -> bool:
    """Whether the ranks spend about as long in communication: nobody is waited for."""
    spent = [_part(e, "device_us", "communication") for e in traces]
    return min(spent) >= (1 - 2 * policy.told_share) * max(spent)
