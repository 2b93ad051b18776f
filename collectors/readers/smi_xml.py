"""`nvidia-smi -q -x`: what `nvidia-smi -q` says, as XML of driver 418 to 580.

In: `<nvidia_smi_log>` with one `<gpu>` each. Out: log_events of kind gpu.bus and gpu.sample, with
the fields that logs.gpu_bus and logs.node_tables have; a value that is N/A is absent.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from collectors.collected import Reading, Source
from collectors.readers import xml_tree
from collectors.readers.artifact import Artifact, TooLargeError
from collectors.readers.quote import clean

if TYPE_CHECKING:
    from collectors.readers.xml_tree import Node

KIND = "nvidia-smi-xml"
BYTES = 64 << 20
_REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""Bits of nvmlClocksEventReasons (nvml.h)."""


def sniff(head: bytes) -> bool:
    """The root element of that output."""
    return b"<nvidia_smi_log" in head[:4096]


def _number(text: str) -> float | None:
    found = re.match(r"\d{1,12}(?:\.\d{1,6})?", text)
    return float(found[0]) if found else None


def _any(node: Node, *paths: tuple[str, ...]) -> float | None:
    """The first of several places that holds a number: drivers moved them."""
    return next((n for p in paths if (n := _number(node.say(*p))) is not None), None)


def _reasons(gpu: Node) -> tuple[int | None, bool | None]:
    """(throttle bits, whether the GPU is idle); None when the driver tells none."""
    node = gpu.first("clocks_event_reasons") or gpu.first("clocks_throttle_reasons")
    if node is None:
        return None, None
    bits, idle = 0, None
    for child in node.children:
        name = re.sub(r"^clocks_(?:event|throttle)_reason_", "", child.name)
        active = child.text.strip() == "Active"
        if name in ("gpu_idle", "idle"):
            idle = active
        elif active:
            bits |= _REASONS.get(name, 0)
    return bits, idle


def _fields(gpu: Node, index: int) -> dict[str, Any]:
    link = ("pci", "pci_gpu_link_info")
    throttle, idle = _reasons(gpu)
    power = ("gpu_power_readings", "power_readings")
    out: dict[str, Any] = {
        "index": index,
        "pci": clean(gpu.attributes.get("id", ""), 20),
        "name": clean(gpu.say("product_name"), 80),
        "gen": _any(gpu, (*link, "pcie_gen", "current_link_gen")),
        "gen_max": _any(gpu, (*link, "pcie_gen", "max_link_gen")),
        "width": _any(gpu, (*link, "link_widths", "current_link_width")),
        "width_max": _any(gpu, (*link, "link_widths", "max_link_width")),
        "replays": _any(gpu, ("pci", "replay_counter")),
        "utilization": _any(gpu, ("utilization", "gpu_util")),
        "temperature": _any(gpu, ("temperature", "gpu_temp")),
        "sm_clock": _any(gpu, ("clocks", "sm_clock")),
        "sm_clock_max": _any(gpu, ("max_clocks", "sm_clock")),
        "power": _any(gpu, *((p, n) for p in power for n in ("average_power_draw", "power_draw"))),
        "power_limit": _any(
            gpu, *((p, n) for p in power for n in ("current_power_limit", "power_limit"))
        ),
        "throttle": throttle,
        "idle": idle,
        "mig": clean(gpu.say("mig_mode", "current_mig"), 20) or None,
        "fabric": clean(gpu.say("fabric", "state"), 40) or None,
    }
    return {k: v for k, v in out.items() if v is not None}


def read(artifact: Artifact) -> Reading:
    """Two rows a GPU, or a Source that says why there are none."""
    try:
        data, broken = artifact.data(BYTES)
        tree = xml_tree.parse(data)
    except (TooLargeError, xml_tree.XmlError) as wrong:
        return Reading(Source(artifact.path, KIND, "none", (str(wrong),)))
    reading = Reading(Source(artifact.path, KIND, "part" if broken else "all"))
    for index, gpu in enumerate(c for c in tree.children if c.name == "gpu"):
        fields = _fields(gpu, index)
        place = gpu.first("pci", "pci_gpu_link_info", "pcie_gen", "current_link_gen") or gpu
        for kind in ("gpu.bus", "gpu.sample"):
            reading.add(
                "log_events",
                source=artifact.path,
                locator=f"line {place.line}",
                kind=kind,
                fields=json.dumps(fields),
                quote=f"GPU {fields['pci']}: <{place.name}>{place.text.strip()}</{place.name}>",
            )
    return reading
