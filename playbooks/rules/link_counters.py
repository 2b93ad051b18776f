"""What counters of ports and links say: link.nic-degraded, link.fabric-congestion, nvlink-degraded.

In: growth of counters between two readings, what the job's rate did meanwhile. Out: roots. Errors
of the line on few ports are those ports'; marks, pauses and retransmits on several hosts, none with
line errors, are the fabric's, when the job's rate shows it. Marks alone are how RoCE works.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import quantiles
from typing import TYPE_CHECKING

from collectors.readers.logs.counter_lines import CONGESTION, HARD
from playbooks.counters import Growth, growths
from playbooks.rules.naming import broke, root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Line errors first: a bad port makes retransmits as well."""
    found = growths(evidence)
    if not found:
        return []
    return _links(found) or _ports(evidence, found) or _fabric(evidence, policy, found)


def _links(found: list[Growth]) -> list[Finding]:
    grew: dict[tuple[str, str], list[Growth]] = defaultdict(list)
    seen = set()
    for one in found:
        if one.device.startswith("GPU "):
            gpu = one.device.split(" link")[0]
            seen.add((one.host, gpu))
            if one.grew > 0:
                grew[one.host, gpu].append(one)
    if not grew or (len(seen) > 1 and len(grew) * 2 > len(seen)):
        return []
    (_host, gpu), worst = max(grew.items(), key=lambda g: sum(x.grew for x in g[1]))
    total = sum(x.grew for x in worst)
    return [
        root(
            "link.nvlink-degraded",
            "likely",
            f"NVLinks of {gpu} counted {total} errors between two readings "
            f"({', '.join(sorted({x.name for x in worst}))}); "
            f"{len(seen) - len(grew)} of {len(seen)} GPUs counted none.",
            [e for x in worst for e in x.events][:4],
            excluded=(
                ("link.nvlink-missing", "the GPU has links; they err"),
                ("slow.straggler-compute", "the path, not the compute, is at fault"),
                ("slow.comm-exposed", "one GPU's links are at fault"),
            ),
            formula=f"{worst[0].device} {worst[0].name}: grew by {worst[0].grew}",
        )
    ]


def _ports(evidence: Evidence, found: list[Growth]) -> list[Finding]:
    ports = {(g.host, g.device) for g in found}
    bad: dict[tuple[str, str], list[Growth]] = defaultdict(list)
    for one in found:
        if one.name in HARD and one.grew > 0:
            bad[one.host, one.device].append(one)
    if not bad or (len(ports) > 1 and len(bad) * 2 > len(ports)):
        return []
    (host, device), worst = max(bad.items(), key=lambda b: sum(x.grew for x in b[1]))
    words = ", ".join(f"{x.name} by {x.grew}" for x in worst[:3])
    flapped = any("down" in x.name for x in worst)
    others = len(ports) - len(bad)
    return [
        root(
            "link.nic-degraded",
            "likely",
            f"{device or 'A port'} of {host} counts errors of its line ({words})"
            + (f"; {others} other ports count none." if others else "."),
            [e for x in worst for e in x.events][:4],
            where="flapping" if flapped else "errors",
            excluded=(
                ("link.fabric-congestion", "errors of one line, not pauses on many hosts"),
                ("link.internode-too-slow", "a port errs"),
                ("slow.comm-exposed", "a port errs"),
                ("hang.transport", "the component is named"),
                *(
                    (("hang.rank-stalled", "a port errs; nobody was late"),)
                    if broke(evidence)
                    else ()
                ),
            ),
            formula=f"growth between two readings: {words}",
        )
    ]


def _fabric(evidence: Evidence, policy: Policy, found: list[Growth]) -> list[Finding]:
    if broke(evidence) or any(g.name in HARD and g.grew > 0 for g in found):
        return []
    loud: dict[str, list[Growth]] = defaultdict(list)
    for one in found:
        if one.name in CONGESTION and one.grew >= policy.congested_packets:
            loud[one.host].append(one)
    spread = _spread(evidence)
    if len(loud) < 2 or spread is None or spread[0] < policy.congested_spread:
        return []
    ratio, shown, what = spread
    worst = [max(g, key=lambda x: x.grew) for g in loud.values()]
    words = ", ".join(f"{x.name} by {x.grew} on {x.host}" for x in worst[:3])
    return [
        root(
            "link.fabric-congestion",
            "likely",
            f"On {len(loud)} hosts marks, pauses or retransmits grow ({words}) without any error "
            f"of a line, and {what} varies {ratio:.2f}-fold.",
            [*(x.events[-1] for x in worst[:3]), *shown],
            excluded=(
                (
                    "link.nic-degraded",
                    "no port has errors of its line, and many hosts are affected",
                ),
                ("link.internode-too-slow", "the rate varies and falls below the ports' own"),
                ("slow.comm-exposed", "the fabric is congested"),
                ("slow.data-bound", "the network, not the loader, varies"),
            ),
            formula=f"90th / 10th percentile of {what} = {ratio:.2f}; {words}",
        )
    ]


def _spread(evidence: Evidence) -> tuple[float, list[Event], str] | None:
    """(90th / 10th percentile, its two lines, of what): rates, else times of steps."""
    for kind, name, what in (
        ("comm.rate", "rate", "the rate of collectives"),
        ("train.step", "step_time", "the time of a step"),
    ):
        rows = [(v, e) for e in evidence.lines.of(kind) if (v := e.number(name)) and v > 0]
        if len(rows) < 8:
            continue
        tenths = quantiles([v for v, _ in rows], n=10)
        low, high = min(rows, key=lambda r: r[0]), max(rows, key=lambda r: r[0])
        return tenths[-1] / tenths[0], [low[1], high[1]], what
    return None
