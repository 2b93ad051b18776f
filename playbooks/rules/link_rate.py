"""A network that works at its rate, which is too low: link.internode-too-slow.

In: the rate of the port that carries the job between its hosts, the rate that collectives reach,
the share of the step that stays exposed. Out: at most one root. All three have to be told: a
network at its rate is no fault while communication hides behind compute.

    gradients of S bytes over n ranks: 2 (n - 1) / n * S / rate seconds a step
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks import costs
from playbooks.benchmarks import nic_rate
from playbooks.rules.link_paths import active_ports
from playbooks.rules.naming import broke, root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_BETWEEN = re.compile(
    r"all[ _-]?reduce|reduce[ _-]?scatter|all[ _-]?gather|busbw|algbw|bus ?bandwidth|network|"
    r"inter[ -]?node|grad",
    re.IGNORECASE,
)
_INSIDE = re.compile(r"intra|one node|inside|nvlink|h2d|d2h|disk|read|write|stor", re.IGNORECASE)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The port's rate, reached, and not enough."""
    if broke(evidence):
        return []
    nominal = _nominal(evidence)
    if nominal is None:
        return []
    rate, shown = nominal
    found = [
        (value, e)
        for e in evidence.lines.of("comm.rate")
        if (value := e.number("rate")) is not None
        and _BETWEEN.search(e.text("text"))
        and not _INSIDE.search(e.text("text"))
        and policy.rate_reached <= value / rate <= policy.rate_beyond
    ]
    exposed = [
        c
        for source in sorted({str(e.row["source"]) for _, e in found})
        if (c := _worst(evidence, source)) is not None
    ]
    if not found or not exposed or max(c.value for c in exposed) < policy.network_share:
        return []
    worst = max(exposed, key=lambda c: c.value)
    value, line = found[len(found) // 2]
    return [
        root(
            "link.internode-too-slow",
            "likely",
            f"Collectives between hosts reach {value:.3g} GB/s, about all that "
            f"{shown.text('device') or 'the port'} offers ({rate:.3g} GB/s), and "
            f"{worst.value:.0%} of the step stays exposed: the network is too slow for the bytes.",
            [line, shown, worst.event],
            excluded=(
                ("slow.comm-exposed", "even perfect overlap could not hide it"),
                ("link.nic-degraded", "the rate reached is the port's own"),
                ("link.socket-fallback", "no faster network is on record"),
                ("link.fabric-congestion", "the rate is steady and the port's own"),
            ),
            formula=f"{value:.3g} / {rate:.3g} GB/s = {value / rate:.0%}; exposed "
            f"{worst.value:.0%} of the step",
        )
    ]


def _worst(evidence: Evidence, source: str) -> costs.Cost | None:
    """The largest exposed share of any run that a log holds; runs on one host expose nothing."""
    found: costs.Cost | None = None
    for event in evidence.lines.of("train.timing"):
        if event.row["source"] != source:
            continue
        value = costs.one_share(event, costs.COMMUNICATION)
        if value is not None and (found is None or value > found.value):
            found = costs.Cost(value, event, 1)
    return found


def _nominal(evidence: Evidence) -> tuple[float, Event] | None:
    """GB/s of the port between hosts; None when a faster one is there or nothing is told."""
    ports = [e for e in evidence.lines.of("net.port") if (e.number("rate") or 0) > 0]
    rdma = active_ports(evidence)
    if rdma:
        offered = nic_rate(evidence)
        return None if offered is None else (offered, rdma[0])
    used = {
        str(i.get("name"))
        for e in evidence.lines.of("nccl-info.socket")
        for i in (e.fields.get("interfaces") or [])
        if isinstance(i, dict)
    }
    named = [e for e in ports if e.text("device") in used] or ports
    rates = {e.number("rate") for e in named}
    if len(rates) != 1:
        return None
    rate = rates.pop() or 0.0
    faster = [e for e in ports if (e.number("rate") or 0) > rate]
    return None if faster else (rate / 8, named[0])
