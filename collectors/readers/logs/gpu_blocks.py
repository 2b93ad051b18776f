"""`nvidia-smi -q`: one block a GPU, a property a line; `dcgmi dmon`; the metrics of dcgm-exporter.

In: lines, and the end of the file. Out: (line, fields of kind gpu.sample) as node_tables has them;
the line is that of the SM clock, so that a reader finds the number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectors.readers.logs.prefix import Line

_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_PROPERTY = re.compile(r"^\s{2,}([A-Za-z][\w /()-]{1,50}?)\s*:\s*(.+?)\s*$")
_SECTION = re.compile(r"^\s{2,}([A-Za-z][\w /()-]{1,50}?)\s*$")
_REASONS = {
    "sw power cap": 0x4,
    "hw slowdown": 0x8,
    "sw thermal slowdown": 0x20,
    "hw thermal slowdown": 0x40,
    "hw power brake slowdown": 0x80,
    "applications clocks setting": 0x2,
}
"""Bits of nvmlClocksEventReasons (nvml.h)."""
_NUMBERS = {
    "average power draw": "power",
    "instantaneous power draw": "power",
    "power draw": "power",
    "current power limit": "power_limit",
    "enforced power limit": "power_limit",
    "power limit": "power_limit",
    "default power limit": "power_default",
    "gpu current temp": "temperature",
}
_ENTITY = {"gputl": "utilization", "tmptr": "temperature", "power": "power", "smclk": "sm_clock"}
_ENTITY |= {"gpuutil": "utilization", "gptl": "utilization", "powerusage": "power"}


_METRIC = re.compile(r"(DCGM_FI_\w{3,60})\{([^{}]{0,2000})\}\s+(\d{1,15}(?:\.\d+)?)")
_LABEL = re.compile(r'(\w{1,40})="([^"]{0,200})"')
_EXPORTED = {
    "DCGM_FI_DEV_SM_CLOCK": "sm_clock",
    "DCGM_FI_DEV_GPU_TEMP": "temperature",
    "DCGM_FI_DEV_POWER_USAGE": "power",
    "DCGM_FI_DEV_GPU_UTIL": "utilization",
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": "power_limit",
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": "throttle",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "throttle",
}


class Blocks:
    """GPUs of one file."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.line: Line | None = None
        self.section = ""
        self.count = 0
        self.columns: list[str] = []
        self.exported: dict[tuple[str, str], tuple[Line, dict[str, Any]]] = {}

    def feed(self, line: Line) -> list[tuple[Line, dict[str, Any]]]:
        """GPUs that this line completes."""
        text = line.text
        found = _GPU.match(text)
        if found:
            done = self.close()
            self.fields = {"index": self.count, "pci": found[1]}
            self.line, self.section = None, ""
            self.count += 1
            return done
        if self.fields:
            self._inside(line, text)
            return []
        if text.startswith("DCGM_FI_"):
            self._export(line, text)
            return []
        return self._dcgm(line, text)

    def _inside(self, line: Line, text: str) -> None:
        found = _PROPERTY.match(text)
        if not found:
            section = _SECTION.match(text)
            if section:
                self.section = section[1].lower()
            return
        key, value = found[1].lower(), found[2]
        number = re.match(r"-?\d+(?:\.\d+)?", value)
        if key in _REASONS and (
            "reason" in self.section or "throttle" in self.section or "slowdown" in key
        ):
            active = value.lower() == "active"
            self.fields["throttle"] = self.fields.get("throttle", 0) | (
                _REASONS[key] if active else 0
            )
        elif key == "product name":
            self.fields["name"] = value[:80]
        elif number and "module" not in self.section and "memory" not in self.section:
            if key in _NUMBERS:
                self.fields.setdefault(_NUMBERS[key], float(number.group()))
            elif key == "sm" and self.section in ("clocks", "max clocks"):
                name = "sm_clock" if self.section == "clocks" else "sm_clock_max"
                self.fields[name] = float(number.group())
                self.line = line if name == "sm_clock" else self.line
            elif key == "gpu" and self.section == "utilization":
                self.fields["utilization"] = float(number.group())

    def close(self) -> list[tuple[Line, dict[str, Any]]]:
        """The last GPU, and those of which single metrics were told."""
        fields, self.fields = self.fields, {}
        done = [(line, told) for line, told in self.exported.values() if "sm_clock" in told]
        self.exported = {}
        return done + ([(self.line, fields)] if fields and self.line is not None else [])

    def _export(self, line: Line, text: str) -> None:
        found = _METRIC.match(text)
        name = _EXPORTED.get(found[1]) if found else None
        labels = dict(_LABEL.findall(found[2])) if found else {}
        if found is None or name is None or not labels.get("gpu", "").isdecimal():
            return
        host = labels.get("Hostname") or labels.get("hostname") or ""
        if len(self.exported) < 65536:
            told = self.exported.setdefault(
                (host[:100], labels["gpu"][:4]), (line, {"index": int(labels["gpu"][:4])})
            )[1]
            told[name] = int(float(found[3])) if name == "throttle" else float(found[3])
            if host:
                told["host"] = host[:100]

    def _dcgm(self, line: Line, text: str) -> list[tuple[Line, dict[str, Any]]]:
        cells = text.split()
        if not cells:
            return []
        if cells[0].lower() in ("#entity", "#") and any(c.lower() in _ENTITY for c in cells):
            self.columns = [c.lower() for c in cells if c not in ("#", "ID")][-len(cells) :]
            self.columns = [c.lstrip("#") for c in self.columns]
            return []
        if not self.columns or cells[0] != "GPU" or len(cells) < 3 or not cells[1].isdecimal():
            return []
        out: dict[str, Any] = {"index": int(cells[1][:4])}
        for name, cell in zip(self.columns[1:], cells[2:], strict=False):
            if name in _ENTITY and re.fullmatch(r"\d{1,6}(?:\.\d+)?", cell):
                out[_ENTITY[name]] = float(cell)
        return [(line, out)] if "sm_clock" in out else []
