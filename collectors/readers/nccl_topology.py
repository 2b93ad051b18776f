"""NCCL's topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE): PCI trees, GPUs, NICs, NVLinks.

In: `<system>` of `<cpu>`, nested `<pci>`, `<gpu>`, `<nic>`/`<net>`, `<nvlink>`. Out: a Topology
where GPUs are in it (provider files list switches and NICs only), and log_events of kind pcie.path
{what, dev, own, path, bridge, bridge_speed, bridge_width}: GB/s of the device's own link and of the
narrowest one between it and the CPU, one direction.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from collectors.collected import Reading, Source
from collectors.readers import xml_tree
from collectors.readers.artifact import Artifact, TooLargeError
from collectors.readers.quote import clean
from collectors.topology.graph import Gpu, Link, Nic, Topology

if TYPE_CHECKING:
    from collectors.readers.xml_tree import Node

KIND = "nccl-topology"
BYTES = 16 << 20
_DEVICES = 256
_SYSTEM = re.compile(rb"<system[ >]")
_LANE = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.969, 32.0: 3.938, 64.0: 7.563}
"""GB/s of one lane, one direction, by GT/s (PCI Express base specifications 1 to 6)."""


@dataclass
class _Device:
    """A GPU or a NIC and the PCI nodes above it, the nearest last."""

    name: str
    index: int
    pci: str
    above: list[Node]
    cpu: int
    line: int
    nvlinks: dict[str, int] = field(default_factory=dict)
    rate: float | None = None
    device: str | None = None


def sniff(head: bytes) -> bool:
    """A `<system>` element with CPUs or PCI nodes near its begin."""
    found = _SYSTEM.search(head)
    return found is not None and (b"<cpu" in head or b"<pci" in head)


def _width(node: Node) -> float | None:
    """GB/s of a PCI node's own link; None where the file does not say."""
    speed = re.match(r"\s*(\d{1,3}(?:\.\d)?)", node.attributes.get("link_speed", ""))
    lanes = node.attributes.get("link_width", "")
    lane = _LANE.get(float(speed[1])) if speed else None
    if lane is None or not lanes.isdecimal() or not 0 < int(lanes[:3]) <= 32:
        return None
    return lane * int(lanes[:3])


class _Walk:
    """Devices in the order of the file."""

    def __init__(self) -> None:
        self.gpus: list[_Device] = []
        self.nics: list[_Device] = []

    def visit(self, node: Node, above: list[Node], cpu: int) -> None:
        for child in node.children:
            if child.name == "pci":
                self.visit(child, [*above, child], cpu)
            elif child.name == "cpu":
                self.visit(child, [], cpu + 1 + node.children.index(child))
            elif child.name == "gpu" and len(self.gpus) < _DEVICES:
                self._gpu(child, above, cpu)
            elif child.name == "nic":
                self._nic(child, above, cpu)

    def _gpu(self, node: Node, above: list[Node], cpu: int) -> None:
        dev = node.attributes.get("dev", "")
        index = int(dev[:4]) if dev.isdecimal() else len(self.gpus)
        pci = above[-1].attributes.get("busid", "") if above else ""
        one = _Device(f"GPU{index}", index, pci.lower(), above, cpu, node.line)
        for link in node.children:
            count = link.attributes.get("count", "")
            if link.name == "nvlink" and count.isdecimal():
                target = link.attributes.get("target", "").lower()
                one.nvlinks[target] = one.nvlinks.get(target, 0) + int(count[:4])
        self.gpus.append(one)

    def _nic(self, node: Node, above: list[Node], cpu: int) -> None:
        if not above:
            return  # virtual interfaces hang on the CPU
        for net in node.children:
            if net.name != "net" or len(self.nics) >= _DEVICES:
                continue
            index = len(self.nics)
            one = _Device(f"NIC{index}", index, "", above, cpu, net.line)
            speed = net.attributes.get("speed", "")
            one.rate = int(speed[:9]) * 1e6 / 8 if speed.isdecimal() else None
            one.device = clean(net.attributes.get("name", ""), 40) or None
            self.nics.append(one)


def _kind(a: _Device, b: _Device) -> str:
    if a.cpu != b.cpu:
        return "socket"
    shared = [x for x, y in zip(a.above, b.above, strict=False) if x is y]
    if not shared:
        return "host-bridge"
    near = len(a.above) - len(shared) <= 1 and len(b.above) - len(shared) <= 1
    return "pcie-switch" if near else "pcie-switches"


def _links(walk: _Walk) -> list[Link]:
    by_pci = {g.pci: g for g in walk.gpus}
    out = []
    for a, b in combinations([*walk.gpus, *walk.nics], 2):
        direct = a.nvlinks.get(b.pci, 0) if b.pci else 0
        switches = {t for t in a.nvlinks if t not in by_pci} & set(b.nvlinks)
        over = min(sum(d.nvlinks[t] for t in switches) for d in (a, b)) if switches else 0
        count = direct or over
        out.append(Link(a.name, b.name, "nvlink" if count else _kind(a, b), count or None))
    return out


def _paths(walk: _Walk) -> list[tuple[dict[str, Any], int]]:
    out: list[tuple[dict[str, Any], int]] = []
    for one in [*walk.gpus, *walk.nics]:
        known = [(w, n) for n in one.above if (w := _width(n)) is not None]
        own = _width(one.above[-1]) if one.above else None
        if own is None or len(known) < 2:
            continue
        path, node = min(known[:-1], key=lambda k: k[0])
        what = "GPU" if one.name.startswith("GPU") else "NIC"
        told: dict[str, Any] = {"what": what, "dev": one.index}
        told |= {"own": round(own, 3), "path": round(min(path, own), 3)}
        told |= {"bridge": clean(node.attributes.get("busid", ""), 20)}
        told |= {"bridge_speed": clean(node.attributes.get("link_speed", ""), 20)}
        told |= {"bridge_width": clean(node.attributes.get("link_width", ""), 4)}
        out.append((told, node.line))
    return out


def read(artifact: Artifact) -> Reading:
    """The topology, or a Source that says why there is none."""
    try:
        data, broken = artifact.data(BYTES)
        tree = xml_tree.parse(data)
    except (TooLargeError, xml_tree.XmlError) as wrong:
        return Reading(Source(artifact.path, KIND, "none", (str(wrong),)))
    walk = _Walk()
    walk.visit(tree, [], 0)
    reading = Reading(Source(artifact.path, KIND, "part" if broken else "all"))
    host = re.split(r"[._]", PurePath(artifact.path).name)[0]
    for told, line in _paths(walk):
        reading.add(
            "log_events",
            source=artifact.path,
            locator=f"line {line}",
            kind="pcie.path",
            fields=json.dumps(told),
            quote=f"PCI {told['bridge']}: {told['bridge_speed']} x{told['bridge_width']}",
        )
    if walk.gpus:
        links = _links(walk)
        lines = {g.name: g.line for g in walk.gpus + walk.nics}
        reading.topologies.append(
            Topology(
                host,
                tuple(Gpu(g.name, g.index) for g in walk.gpus),
                tuple(Nic(n.name, n.device, n.rate) for n in walk.nics),
                tuple(links),
                artifact.path,
                {(x.a, x.b): f"line {lines[x.a]}" for x in links},
                modelled=True,
            )
        )
    return reading
