"""Paths that NCCL chose against what the machine has: socket-fallback, gdr-off, nvlink-unused,
p2p-broken.

In: channels, networks and NICs of NCCL's log, topologies, port states, notes. Out: roots. What is
absent from NCCL's choice is a fault only where an artifact shows that the machine has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.finding import Item
from playbooks.rules.naming import progressed, root

if TYPE_CHECKING:
    from collections.abc import Callable

    from collectors.topology.graph import Topology
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

NEAR = ("pcie-switch", "pcie-switches")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Every path that is worse than it has to be."""
    parts: tuple[Callable[[Evidence, Policy], list[Finding]], ...] = (
        _socket,
        _gdr,
        _nvlink,
        _p2p,
    )
    return [f for part in parts for f in part(evidence, policy)]


def active_ports(evidence: Evidence) -> list[Event]:
    """RDMA ports that are up."""
    return [
        e
        for e in evidence.lines.of("ib.port")
        if e.text("state").lower() == "active" or e.text("link") == "Up"
    ]


def _socket(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    nccl = evidence.nccl
    over = [e for e in evidence.lines.of("nccl-info.net") if e.text("network") == "Socket"]
    sent = [e for e in evidence.lines.of("nccl-info.channel") if e.text("network") == "Socket"]
    if not (over or sent) or not nccl.several_hosts or evidence.lines.of("nccl.ofi-provider"):
        return []
    if not (nccl.started or sent or progressed(evidence)):
        return []
    ports = active_ports(evidence)
    sockets = {e.place for e in over + sent}
    others = {h: d for h, d in nccl.devices.items() if h not in sockets}
    off = nccl.value("NCCL_IB_DISABLE")
    disabled = off is not None and off[0] not in ("0", "")
    if not ports and not others:
        return []
    none = [e for e in evidence.lines.of("nccl-info.ib") if e.fields.get("none")]
    why = (
        "NCCL_IB_DISABLE is set"
        if disabled
        else ("NCCL found no device" if none else "NCCL did not use it")
    )
    have = (
        f"{len(ports)} RDMA port{'s are' if len(ports) > 1 else ' is'} active"
        if ports
        else f"{min(others)} uses InfiniBand"
    )
    sure: Confidence = "certain" if ports and (none or disabled) else "likely"
    return [
        root(
            "link.socket-fallback",
            sure,
            f"NCCL uses TCP sockets between hosts although {have}; {why}.",
            [*(sent or over)[:2], *none[:1], *ports[:1], *([off[1]] if off and disabled else [])],
            excluded=(
                ("link.internode-too-slow", "a fast network exists and is idle"),
                ("config.efa-provider", "no OFI plugin chose it"),
                ("link.gdr-off", "there is no RDMA in use to begin with"),
                ("slow.comm-exposed", "the network in use is not the one that is there"),
            ),
        )
    ]


def topology_of(evidence: Evidence, host: str) -> Topology | None:
    """The host's topology; the only one given stands for all hosts."""
    known = evidence.collected.topologies
    own = [t for t in known if t.host == host]
    return (own or (known if len(known) == 1 else [None]))[0]  # type: ignore[list-item]  # absent


def _gdr(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    sent = [e for e in evidence.lines.of("nccl-info.channel") if e.text("network").startswith("IB")]
    by_host: dict[str, set[bool]] = {}
    for event in sent:
        by_host.setdefault(event.place, set()).add(bool(event.fields.get("gdr")))
    on = sorted(h for h, s in by_host.items() if True in s)
    off = sorted(h for h, s in by_host.items() if s == {False})
    said = [e for e in evidence.lines.of("nccl-info.gdr") if e.text("state").lower() == "disabled"]
    if not off and not said:
        return []
    near = [h for h in off if _near(evidence, h)]
    far = [h for h in off if _near(evidence, h) is False]
    culprits = [h for h in off if h not in far] if on else near
    if not culprits and not (said and not far):
        return []
    without = [e for e in sent if e.place in culprits][:2]
    with_it = [e for e in sent if e.place in on][:1]
    hosts = ", ".join(culprits or sorted({e.place for e in said}))
    tail = f", while {on[0]} has it" if on else ", although GPU and NIC share a PCIe switch"
    if said and not culprits:
        tail = ": NCCL says that it is disabled for the NIC"
    sure: Confidence = "certain" if near or (said and culprits) else "likely"
    return [
        root(
            "link.gdr-off",
            sure,
            f"Channels of {hosts} over InfiniBand go without GPUDirect RDMA{tail}.",
            [*without, *with_it, *said[:2]],
            where="env" if evidence.nccl.value("NCCL_NET_GDR_LEVEL") else None,
            excluded=(
                ("link.nic-affinity", "near pairs of GPU and NIC lack it"),
                ("link.socket-fallback", "verbs are in use"),
                ("link.internode-too-slow", "the NICs could do more than host memory lets them"),
            ),
        )
    ]


def _near(evidence: Evidence, host: str) -> bool | None:
    """Whether that host's GPUs have a NIC behind their own PCIe switches; None when unknown."""
    topology = topology_of(evidence, host)
    if topology is None or not topology.nics:
        return None
    nics = {n.name for n in topology.nics}
    kinds = [
        x.kind for x in topology.links if (x.a in nics) != (x.b in nics) and x.kind != "unknown"
    ]
    return None if not kinds else any(k in NEAR for k in kinds)


def _nvlink(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    ranks = evidence.nccl.of_rank
    for event in evidence.lines.of("nccl-info.channel"):
        if event.fields.get("transport") not in ("SHM", "NET"):
            continue
        a, b = event.number("source"), event.number("target")
        one = ranks.get(int(a)) if a is not None else None
        other = ranks.get(int(b)) if b is not None else None
        if one is None or other is None or one is other or one.host != other.host:
            continue
        topology = topology_of(evidence, one.host)
        if topology is None or not _joined(topology, one.nvml_dev, other.nvml_dev):
            continue
        alone = one.cuda_dev == other.cuda_dev and one.bus_id != other.bus_id
        env = [
            e
            for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
            for e in evidence.nccl.env.get(name, {}).values()
            if e.text("value") not in ("0", "SYS", "NVL")
        ]
        why = "isolation" if alone else ("env" if env else None)
        words = {
            "isolation": "each rank sees only one GPU",
            "env": f"{env[0].text('name')}={env[0].text('value')} is set" if env else "",
            None: "why is not on record",
        }[why]
        link = next(x for x in topology.links if x.kind == "nvlink")
        shown = Item(
            topology.source,
            topology.locators.get((link.a, link.b), "matrix"),
            f"{link.a} and {link.b} of {topology.host} are joined by NV{link.count or ''}",
        )
        return [
            root(
                "link.nvlink-unused",
                "certain" if why else "likely",
                f"Ranks {int(a or 0)} and {int(b or 0)} of {one.host} exchange over "
                f"{event.text('transport')} although NVLink joins their GPUs; {words}.",
                [event, *(c for c in one.comms[:1] + other.comms[:1] if alone), *env[:1]],
                more=[shown],
                where=why,
                excluded=(
                    ("link.nvlink-missing", "the topology shows NVLink for these GPUs"),
                    ("link.p2p-broken", "data flows, over a slower path"),
                    ("slow.comm-exposed", "the path is not the one that the machine has"),
                ),
            )
        ]
    return []


def _joined(topology: Topology, a: int | None, b: int | None) -> bool:
    """Whether NVLink joins two GPUs; all pairs have to when the numbers do not tell which."""
    pairs = [x for x in topology.links if x.a.startswith("GPU") and x.b.startswith("GPU")]
    if not any(x.kind == "nvlink" for x in pairs):
        return False
    if a is not None and b is not None and a != b:
        link = topology.link(f"GPU{a}", f"GPU{b}")
        return link is not None and link.kind == "nvlink"
    return all(x.kind == "nvlink" for x in pairs)


def _p2p(evidence: Evidence, policy: Policy) -> list[Finding]:
    del policy
    lines = evidence.lines
    stuck = [
        e
        for e in lines.of("nccl.timeout", "nccl.watchdog-terminated")
        if (e.number("seq") or 0) <= 2  # the first collectives of a job
    ]
    helps = [
        e
        for e in lines.of("note.helps")
        if e.text("variable") == "NCCL_P2P_DISABLE"
        and e.text("value") == "1"
        and e.fields.get("works")
    ]
    acs = [
        e
        for e in lines.of("pcie.acs")
        if "SrcValid+" in e.text("flags") or "ReqRedir+" in e.text("flags")
    ]
    faults = lines.of("kernel.iommu-fault")
    chosen = [e for e in lines.of("nccl-info.channel") if e.fields.get("transport") == "P2P"]
    nvlink = any(x.kind == "nvlink" for t in evidence.collected.topologies for x in t.links)
    if progressed(evidence) or nvlink or not (stuck or helps) or not (helps or acs or faults):
        return []
    if not chosen and not helps:
        return []
    sure: Confidence = "certain" if helps and (acs or faults) else "likely"
    return [
        root(
            "link.p2p-broken",
            sure,
            "GPUs exchange over PCIe peer-to-peer and the first collective never ends"
            + ("; NCCL_P2P_DISABLE=1 makes it pass" if helps else "")
            + (", and ACS is on" if acs else ("; the IOMMU reports faults" if faults else ""))
            + ".",
            [*chosen[:1], *stuck[:1], *helps[:1], *acs[:1], *faults[:1]],
            where="acs-iommu" if acs or faults else None,
            excluded=(
                ("hang.transport", "the path is named"),
                ("hang.rank-stalled", "all ranks are inside the first collective"),
                ("hang.rank-died", "the ranks ended because the collective never did"),
                ("hang.slow-not-dead", "already the first collective never ends"),
                ("hang.collective-mismatch", "already the first collective hangs"),
            ),
        )
    ]
