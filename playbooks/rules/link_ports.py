"""NICs and fabrics that fail: link.nic-degraded, config.roce-gid, link.fabric-unreachable.

In: completion errors, verbs failures, kernel lines, port states and rates. Out: roots. A completion
error alone never decides: a dead peer looks the same. A fault of a port does, and so does a first
transfer that fails where nothing worked before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.rules.naming import broke, progressed, root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_FABRIC_NIC = re.compile(r"mlx\d|\bib\d|ibp\d|bnxt_re|irdma|\befa\b|hfi1|infiniband", re.IGNORECASE)
_RETRY_EXCEEDED = 12
"""IBV_WC_RETRY_EXC_ERR (verbs.h)."""


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A port that failed in a job that ran, or a path that never worked."""
    faults = _faults(evidence)
    if faults:
        found = _degraded(evidence, policy, faults)
        if found:
            return found
    if not broke(evidence) or progressed(evidence):
        return []
    return _never(evidence)


def _faults(evidence: Evidence) -> list[Event]:
    """Hard faults of ports, but the link changes of a boot."""
    lines = evidence.lines
    kernel = [
        e
        for e in lines.of("kernel.link-down", "kernel.cable")
        if _FABRIC_NIC.search(e.item.quote) and not _before_job(evidence, e)
    ]
    events = [e for e in lines.of("nccl.port-event") if "error" in e.text("message")]
    down = [
        e
        for e in lines.of("ib.port")
        if e.text("state").lower() in ("down", "init", "armed")
        and e.text("physical").lower() != "disabled"  # switched off by somebody, not broken
        and (lines.of("nccl.completion-error") or len(_siblings(lines.of("ib.port"), e)) > 2)
    ]
    return [
        *kernel,
        *lines.of("nccl.speed-change"),
        *events,
        *down,
        *_slow_ports(lines.of("ib.port")),
    ]


def _before_job(evidence: Evidence, event: Event) -> bool:
    steps = [e.at_ns for e in evidence.lines.of("train.step") if e.at_ns is not None]
    return event.at_ns is not None and bool(steps) and event.at_ns < min(steps)


def _siblings(ports: list[Event], one: Event) -> list[Event]:
    """Active ports of the same kind of adapter: storage and management NICs are of another."""
    kind = (one.text("type"), one.text("layer"), one.place)
    return [
        e
        for e in ports
        if e is not one
        and kind[0]
        and (e.text("type"), e.text("layer"), e.place) == kind
        and e.text("state").lower() == "active"
    ]


def _slow_ports(ports: list[Event]) -> list[Event]:
    """Active ports below the rate that most ports of their layer have."""
    rates = [
        (e, r)
        for e in ports
        if (r := e.number("rate")) is not None and e.text("state").lower() == "active"
    ]
    out = []
    for event, rate in rates:
        peers = [r for e in _siblings(ports, event) if (r := e.number("rate")) is not None]
        if len(peers) > 2 and len(set(peers)) == 1 and rate < peers[0]:
            out.append(event)
    return out


def _degraded(evidence: Evidence, policy: Policy, faults: list[Event]) -> list[Finding]:
    lines = evidence.lines
    failed = broke(evidence)
    errors = [e for e in lines.of("nccl.completion-error") if e.number("status") == _RETRY_EXCEEDED]
    static = [f for f in faults if not f.kind.startswith("kernel.")]
    if not failed and not static:
        return []
    times = [f.at_ns for f in faults if f.at_ns is not None]
    dead = [
        e
        for e in evidence.ends
        if e.at_ns is not None and times and e.at_ns + policy.together_ns < min(times)
    ]
    if dead:
        return []
    counters = [e for e in lines.of("ib.counter") if (e.number("value") or 0) > 0]
    first = faults[0]
    device = first.text("device") or "a port"
    sure: Confidence = "certain" if errors and times else "likely"
    what = {
        "kernel.link-down": "lost its link",
        "kernel.cable": "reports a cable error",
        "nccl.speed-change": "changed its speed",
        "nccl.port-event": "reported a port error",
        "ib.port": f"is {first.text('state') or 'not active'}"
        + (f" at {first.number('rate'):g} Gb/s" if first.number("rate") is not None else ""),
    }[first.kind]
    kind = {"kernel.cable": "errors", "nccl.speed-change": "speed"}.get(first.kind, "down")
    excluded = [
        (
            "config.roce-gid",
            "the path worked earlier" if progressed(evidence) else "a port is down",
        ),
        ("link.fabric-congestion", "a port's state changed or reports hard errors"),
        ("hang.transport", "the component is named"),
    ]
    if errors:
        excluded.append(("crash.user-exception", "the network fails, not the program's code"))
    if failed and (errors or times):
        excluded += [
            ("hang.rank-died", "no rank ended before the port failed"),
            ("hang.rank-stalled", "the connection broke; nobody was late"),
        ]
    seen = (
        f", and NCCL's transfers to {errors[0].text('peer')} ran out of retries" if errors else ""
    )
    return [
        root(
            "link.nic-degraded",
            sure,
            f"{device} of {first.label} {what}{seen}.",
            [*faults[:3], *errors[:1], *counters[:1]],
            where=kind,
            excluded=excluded,
        )
    ]


# --- a path that never worked -----------------------------------------------------------------


def _never(evidence: Evidence) -> list[Finding]:
    lines = evidence.lines
    errors = [e for e in lines.of("nccl.completion-error") if e.number("status") == _RETRY_EXCEEDED]
    refused = [e for e in lines.of("nccl.verbs-failed") if e.text("call") == "ibv_modify_qp"]
    said = refused + errors
    if not said or any(e.at_ns is not None and _ended(evidence, e.at_ns) for e in said[:1]):
        return []
    layers = {layer for listed in evidence.nccl.devices.values() for _, layer in listed}
    if layers == {"RoCE"}:
        return _roce(evidence, said)
    if layers == {"IB"}:
        return _unreachable(said, bool(refused))
    return []


def _ended(evidence: Evidence, at_ns: int) -> bool:
    return any(e.at_ns is not None and e.at_ns < at_ns for e in evidence.ends)


def _roce(evidence: Evidence, said: list[Event]) -> list[Finding]:
    told = list(evidence.nccl.env.get("NCCL_IB_GID_INDEX", {}).values())
    local = [e for e in said if _gid(e)]
    sure: Confidence = "likely" if told or local else "possible"
    detail = (
        f"NCCL_IB_GID_INDEX is {told[0].text('value')}"
        if told
        else ("a link-local GID is in use" if local else "which GIDs are in use is not on record")
    )
    return [
        root(
            "config.roce-gid",
            sure,
            f"The first transfer over RoCE fails between hosts whose TCP works; {detail}.",
            [*said[:3], *told[:1]],
            excluded=(
                ("link.nic-degraded", "it never worked in this job"),
                ("config.port-blocked", "TCP works"),
                ("link.fabric-unreachable", "the link layer is Ethernet"),
                ("hang.rank-died", "no rank ended before"),
            ),
        )
    ]


def _gid(event: Event) -> bool:
    """Whether one side's GID is link-local and the other's is not, or both are link-local."""
    gids = [event.text("local_gid"), event.text("remote_gid")]
    return any(g.lower().startswith("fe80") for g in gids)


def _unreachable(said: list[Event], refused: bool) -> list[Finding]:
    return [
        root(
            "link.fabric-unreachable",
            "likely",
            "Verbs connections between NICs that are up fail at "
            f"{'set-up' if refused else 'the first transfer'}, while TCP between the hosts works.",
            said,
            excluded=(
                ("link.nic-degraded", "this pair never worked"),
                ("config.roce-gid", "the link layer is InfiniBand"),
                ("config.port-blocked", "TCP between the hosts works"),
                ("hang.rank-died", "no rank ended before"),
            ),
        )
    ]
