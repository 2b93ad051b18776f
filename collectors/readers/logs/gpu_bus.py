"""`nvidia-smi -q`: what each GPU's PCIe link, NVSwitch fabric and load are at that moment.

In: lines, and the end of the file. Out: (line, fields) of kind gpu.bus, one a GPU; the line is that
of the current PCIe generation.

| fields | index, pci, name, gen, gen_max, width, width_max, replays, utilization, power, |
|        | power_limit, idle (the Idle reason is active), fabric, remap_pending |
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectors.readers.logs.prefix import Line

_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_PROPERTY = re.compile(r"^(\s{2,})([A-Za-z][\w /()-]{0,50}?)\s*:\s*(\S.*?)\s*$")
_SECTION = re.compile(r"^(\s{2,})([A-Za-z][\w /()-]{0,50}?)\s*$")
_NUMBERS = {
    ("pcie generation", "current"): "gen",
    ("pcie generation", "device current"): "gen",
    ("pcie generation", "max"): "gen_max",
    ("link width", "current"): "width",
    ("link width", "max"): "width_max",
    ("utilization", "gpu"): "utilization",
    ("", "replays since reset"): "replays",
    ("", "average power draw"): "power",
    ("", "power draw"): "power",
    ("", "current power limit"): "power_limit",
    ("", "power limit"): "power_limit",
}
_GPUS = 1024


class Bus:
    """GPUs of one file."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.line: Line | None = None
        self.section = ""
        self.count = 0

    def feed(self, line: Line) -> list[tuple[Line, dict[str, Any]]]:
        """The GPU that this line ends."""
        text = line.text
        found = _GPU.match(text) if text.startswith("GPU ") else None
        if found and self.count < _GPUS:
            done = self.close()
            self.fields = {"index": self.count, "pci": found[1]}
            self.line, self.section = None, ""
            self.count += 1
            return done
        if not self.fields:
            return []
        if text and not text[0].isspace():
            return self.close()
        self._inside(line, text)
        return []

    def _inside(self, line: Line, text: str) -> None:
        section = _SECTION.match(text)
        if section:
            self.section = section[2].lower()
            return
        found = _PROPERTY.match(text)
        if not found:
            return
        key, value = found[2].lower(), found[3]
        if key == "product name":
            self.fields["name"] = value[:80]
        elif key == "idle" and "reason" in self.section:
            self.fields["idle"] = value == "Active"
        elif self.section == "fabric" and key in ("state", "status"):
            self.fields.setdefault("fabric", value[:40])
        elif self.section == "remapped rows" and key == "pending":
            self.fields["remap_pending"] = value == "Yes"
        name = _NUMBERS.get((self.section, key)) or _NUMBERS.get(("", key))
        number = re.match(r"\d{1,12}(?:\.\d{1,6})?(?=x?(?:\s|$))", value)
        if name and number:
            self.fields.setdefault(name, float(number[0]))
            if name == "gen":
                self.line = line

    def close(self) -> list[tuple[Line, dict[str, Any]]]:
        """The last GPU."""
        fields, self.fields = self.fields, {}
        return [(self.line, fields)] if fields and self.line is not None else []
