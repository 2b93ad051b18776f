"""Tables that stand in text of any kind: `nvidia-smi --query-gpu`, dmon, ibstat.

In: lines, one after another. Out: (kind, fields) for each row that is complete.

| kind | fields |
|---|---|
| gpu.sample | index, name, throttle (bits), sm_clock, sm_clock_max, temperature, power, |
|   | power_limit, utilization, width, width_max, gen, gen_max, memory_used, mig |
| ib.port | device, state, physical, rate (Gb/s), layer |
| nvlink.link | gpu, link, speed (GB/s, 0 when inactive), name of the GPU |
"""

from __future__ import annotations

import re
from typing import Any

_COLUMNS = {
    "index": "index",
    "name": "name",
    "gpu_name": "name",
    "pci.bus_id": "pci",
    "pcie.link.gen.current": "gen",
    "pcie.link.gen.gpucurrent": "gen",
    "pcie.link.gen.max": "gen_max",
    "pcie.link.gen.gpumax": "gen_max",
    "pcie.link.width.current": "width",
    "pcie.link.width.max": "width_max",
    "clocks_throttle_reasons.active": "throttle",
    "clocks_event_reasons.active": "throttle",
    "clocks.current.sm": "sm_clock",
    "clocks.sm": "sm_clock",
    "clocks.current.graphics": "sm_clock",
    "clocks.gr": "sm_clock",
    "clocks.max.sm": "sm_clock_max",
    "clocks.max.graphics": "sm_clock_max",
    "temperature.gpu": "temperature",
    "power.draw": "power",
    "power.draw.instant": "power",
    "power.limit": "power_limit",
    "enforced.power.limit": "power_limit",
    "power.default_limit": "power_default",
    "utilization.gpu": "utilization",
    "memory.used": "memory_used",
    "mig.mode.current": "mig",
}
_BITS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""Bits of clocks_event_reasons as NVML defines them (nvml.h, nvmlClocksEventReason*)."""
_TEXT = {"name", "pci", "mig"}
_DMON = {"gpu": "index", "pwr": "power", "gtemp": "temperature", "sm": "utilization"}
_DMON |= {"pclk": "sm_clock"}
_QUERY = re.compile(r"--query-gpu[= ]([\w.,]+)")
_FIELDS = 64


def _value(name: str, text: str) -> Any:
    text = text.strip()
    if name in _TEXT:
        return text[:80]
    if text.lower().startswith("0x"):
        return int(text, 16) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", text) else None
    found = re.match(r"-?\d+(?:\.\d+)?", text)
    return float(found.group()) if found and len(found.group()) < 30 else None


class _Smi:
    """`--query-gpu` as CSV, with its header or after the command that names the columns."""

    def __init__(self) -> None:
        self.columns: list[str] = []

    def feed(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        asked = _QUERY.search(text) if "--query-gpu" in text else None
        if asked:
            self.columns = asked.group(1).split(",")[:_FIELDS]
            return []
        if ", " not in text:
            self.columns = self.columns if text.startswith("$") or not text else []
            return []
        cells = [c.strip() for c in text.split(",")][:_FIELDS]
        names = [re.sub(r"\s*\[.*\]$", "", c) for c in cells]
        if sum(n in _COLUMNS for n in names) >= 2:
            self.columns = names
            return []
        if len(cells) != len(self.columns):
            return []
        return self._row(cells)

    def _row(self, cells: list[str]) -> list[tuple[str, dict[str, Any]]]:
        out: dict[str, Any] = {}
        bits = 0
        told = False
        for column, cell in zip(self.columns, cells, strict=True):
            reason = _BITS.get(column.rsplit(".", 1)[-1]) if "_reasons." in column else None
            if reason is not None:
                told = True
                bits |= reason if cell.lower() == "active" else 0
            elif column in _COLUMNS:
                out[_COLUMNS[column]] = _value(_COLUMNS[column], cell)
        if told:
            out["throttle"] = bits
        if isinstance(out.get("index"), float):
            out["index"] = int(out["index"])
        return [("gpu.sample", {k: v for k, v in out.items() if v is not None})]


class _Dmon:
    """`nvidia-smi dmon`."""

    def __init__(self) -> None:
        self.columns: list[str] = []

    def feed(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        cells = text.split()
        if text.startswith("#"):
            if "gpu" in cells and ("pwr" in cells or "sm" in cells):
                self.columns = cells[1:]
            return []
        if not self.columns or len(cells) != len(self.columns) or not cells[0].isdecimal():
            return []
        pairs = dict(zip(self.columns, cells, strict=True))
        found = {_DMON[k]: _value(k, v) for k, v in pairs.items() if k in _DMON}
        out = {k: v for k, v in found.items() if v is not None}
        if "index" not in out:
            return []
        held = (pairs.get("tviol"), 0x20), (pairs.get("pviol"), 0x4)
        bits = sum(bit for cell, bit in held if cell and cell not in ("0", "-"))
        return [("gpu.sample", {**out, "index": int(out["index"]), "throttle": bits})]


_STATUS = re.compile(r"\s*Infiniband device '([\w.-]+)' port \d+ status:")


class _Ibstat:
    """`ibstat`, `ibstatus` and `ibv_devinfo`: one port after another, a property a line."""

    def __init__(self) -> None:
        self.device: str | None = None
        self.type = ""
        self.host = ""
        self.port: dict[str, Any] = {}

    def feed(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        status = _STATUS.match(text)
        if status:
            self.device, self.type, self.port = status.group(1), "ibstatus", {}
            return []
        found = re.match(
            r"\s*(?:([A-Za-z][\w.-]*): ?)?(?:CA '([\w.-]+)'|hca_id:\s*([\w.-]+))\s*$", text
        )
        if found:
            self.device, self.type, self.port = found.group(2) or found.group(3), "", {}
            self.host = found.group(1) or ""
            return []
        if self.device is None:
            return []
        found = re.match(
            r"\s*(?:[A-Za-z][\w.-]*: )?\s*(CA type|vendor_part_id|State|state|Physical state|"
            r"phys_state|phys state|Rate|rate|active_width|active_speed|Link layer|link_layer):"
            r"\s*(?:\d+: )?(\S+)",
            text,
        )
        if not found:
            return []
        name = {"Physical state": "physical", "Link layer": "layer", "link_layer": "layer"}
        name |= {"phys_state": "physical", "phys state": "physical"}
        if found.group(1) in ("CA type", "vendor_part_id"):
            self.type = found.group(2)
            return []
        key = name.get(found.group(1), found.group(1).lower())
        value = found.group(2).removeprefix("PORT_").capitalize()
        numbers = ("rate", "active_width", "active_speed")
        self.port[key] = _value("rate", value) if key in numbers else value
        if key != "layer":
            return []
        lanes, lane = self.port.pop("active_width", None), self.port.pop("active_speed", None)
        if lanes and lane:  # ibv_devinfo tells both and leaves the product to its reader
            self.port.setdefault("rate", lanes * lane)
        out = {"device": self.device, "type": self.type, **self.port, "layer": found.group(2)}
        if self.host:
            out["host"] = self.host
        self.port = {}
        return [("ib.port", out)]


class _Nvlink:
    """`nvidia-smi nvlink -s`: links below the GPU that they belong to."""

    def __init__(self) -> None:
        self.gpu: int | None = None
        self.name = ""

    def feed(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        model = re.match(r"\s*GPU \d{1,3}: (.{3,60}?) \(UUID", text)
        self.name = model.group(1) if model else self.name
        found = re.match(
            r"\s*(?:GPU (\d{1,3}): .*UUID|Link (\d{1,3}): (<inactive>|[\d.]+ GB/s))", text
        )
        if not found:
            return []
        if found.group(1):
            self.gpu = int(found.group(1))
            return []
        if self.gpu is None:
            return []
        speed = _value("speed", found.group(3)) or 0.0
        told = {"gpu": self.gpu, "link": int(found.group(2)), "speed": speed, "name": self.name}
        return [("nvlink.link", told)]


class Tables:
    """All of them for one file."""

    def __init__(self) -> None:
        self.parts = (_Smi(), _Dmon(), _Ibstat(), _Nvlink())

    def feed(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Rows that this line completes."""
        return [found for part in self.parts for found in part.feed(text)]
