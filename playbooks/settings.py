"""What a job was set to do, as far as any line tells: stages, microbatches, sharding, overlap.

In: events of kinds train.setting, config.value and train.size. Out: the value that configuration,
else prose, tells for each name, None where nothing does. Sentences are not exact, so a rule uses
these beside measurements.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playbooks.lines import Event, Lines


class Settings:
    """Settings of one pile."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    @cached_property
    def _told(self) -> dict[str, list[Event]]:
        out: dict[str, list[Event]] = {}
        for event in self._lines.of("config.value", "train.setting"):
            out.setdefault(event.text("name"), []).append(event)
        return out

    def events(self, name: str) -> list[Event]:
        """Lines that tell it."""
        return self._told.get(name, [])

    def number(self, name: str) -> float | None:
        """Its number; configuration before prose."""
        found = [v for e in self.events(name) if (v := e.number("value")) is not None]
        return found[0] if found else None

    def text(self, name: str) -> str | None:
        """Its word."""
        found = [e.text("value") for e in self.events(name) if e.text("value")]
        return found[-1] if found else None

    @cached_property
    def microbatches(self) -> int | None:
        """Microbatches of a pipeline's step, told or global batch / (microbatch * dp)."""
        told = self.number("microbatches")
        if told:
            return int(told)
        parts = [self.number(n) for n in ("global_batch", "micro_batch", "dp")]
        if all(parts):
            whole, micro, dp = (float(p or 0) for p in parts)
            return int(whole / (micro * dp)) if whole >= micro * dp else None
        return None

    @cached_property
    def parameters(self) -> float | None:
        """Parameters of the model."""
        found = [v for e in self._lines.of("train.size") if (v := e.number("parameters"))]
        return max(found, default=None)

    @cached_property
    def overlap_off(self) -> list[Event]:
        """Lines that switch an overlap off, unless one switches it on."""
        off = [e for e in self.events("overlap") if e.number("value") == 0]
        on = [e for e in self.events("overlap") if e.number("value") == 1]
        return off if not on or len(off) > len(on) else []
