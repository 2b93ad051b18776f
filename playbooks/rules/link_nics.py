"""Which NIC a GPU uses, and how many the job uses: link.nic-affinity, link.nics-unused.

In: channels over NET/IB with their NIC's number, the list after "NET/IB : Using", topologies, port
states. Out: roots. A far NIC is a fault only while a near one is up and in the list; a short list
is one only against ports of the same layer and rate on that host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.rules.link_paths import NEAR, active_ports, topology_of
from playbooks.rules.naming import broke, root

if TYPE_CHECKING:
    from collectors.topology.graph import Topology
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_FAR = ("node", "socket")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The mapping, then the count."""
    del policy
    if broke(evidence):
        return []
    return _affinity(evidence) + _unused(evidence)


def _distances(topology: Topology, gpu: int, devices: list[tuple[str, str]]) -> dict[int, str]:
    """Kind of path from that GPU to each NIC of the list."""
    names = {n.device or n.name: n.name for n in topology.nics}
    out = {}
    for place, (device, _) in enumerate(devices):
        link = topology.link(f"GPU{gpu}", names.get(device, device))
        if link is not None:
            out[place] = link.kind
    return out


def _affinity(evidence: Evidence) -> list[Finding]:
    far: list[Event] = []
    first = ""
    for process in evidence.nccl.processes:
        devices = evidence.nccl.devices.get(process.host)
        topology = topology_of(evidence, process.host)
        if devices is None or topology is None or process.nvml_dev is None:
            continue
        kinds = _distances(topology, process.nvml_dev, devices)
        if not any(k in NEAR for k in kinds.values()):
            continue
        for event in process.channels:
            nic, proxy = event.number("nic"), event.number("proxy")
            own = proxy is None or proxy == process.rank  # else another rank's GPU sends (PXN)
            if nic is None or not own or event.text("way") != "send":
                continue
            if kinds.get(int(nic)) in _FAR:
                near = next(devices[i][0] for i, k in kinds.items() if k in NEAR)
                first = first or (
                    f"GPU {process.nvml_dev} of {process.host} sends through "
                    f"{devices[int(nic)][0]}, which is far from it, although {near} is near"
                )
                far.append(event)
    if not far:
        return []
    return [
        root(
            "link.nic-affinity",
            "likely",
            f"{first} ({len(far)} such channels).",
            far,
            excluded=(
                ("link.nics-unused", "the mapping is wrong, not the count"),
                ("link.gdr-off", "GPUDirect is off only for far pairs"),
            ),
        )
    ]


def _unused(evidence: Evidence) -> list[Finding]:
    ports = active_ports(evidence)
    for host, devices in sorted(evidence.nccl.devices.items()):
        layers = {layer for _, layer in devices}
        wanted = {"IB": "InfiniBand", "RoCE": "Ethernet"}.get(min(layers), "")
        own = [e for e in ports if e.text("layer") == wanted and e.host in (host, None)]
        used = {name for name, _ in devices}
        if not used <= {e.text("device") for e in own}:
            continue  # the ports are those of another host
        rates = {e.number("rate") for e in own if e.text("device") in used}
        idle = {
            e.text("device"): e
            for e in own
            if e.text("device") not in used and e.number("rate") in rates
        }
        if not idle or len(layers) > 1:
            continue
        told = evidence.nccl.env.get("NCCL_IB_HCA", {}).get(host)
        why = f"; NCCL_IB_HCA is {told.text('value')}" if told else ""
        listed = [e for e in evidence.lines.of("nccl-info.ib") if e.place == host]
        return [
            root(
                "link.nics-unused",
                "certain" if told else "likely",
                f"{host} has {len(idle) + len(used)} active NICs of one kind and NCCL uses "
                f"{len(used)}: {', '.join(sorted(idle)[:8])} {'are' if len(idle) > 1 else 'is'} "
                f"idle{why}.",
                [*listed[:1], *list(idle.values())[:2], *([told] if told else [])],
                excluded=(
                    ("link.nic-affinity", "some NICs carry nothing at all"),
                    ("link.nic-degraded", "the idle ports are active"),
                    ("link.socket-fallback", "verbs are in use, on too few ports"),
                ),
            )
        ]
    return []
