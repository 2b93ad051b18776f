"""What a trace's collectives and copies carried: sizes of all-reduces a step, tokens routed, bytes.

In: kernels of communication and copies with their arguments. Out: reduces {step: [elements, ...]}
in order of begin, routed (mean elements that an all-to-all brings to this rank, or takes from it
where that is more), copies {"HtoD": us, "DtoH": us}. Bounded: the first steps and messages are
kept.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_MOST = 20_000
_STEPS = 16


class Messages:
    """Messages of one rank."""

    def __init__(self) -> None:
        self.reduced: list[tuple[float, int]] = []
        self.routed: list[int] = []
        self.copied: dict[str, float] = defaultdict(float)

    def collective(self, op: str, start: float, args: dict[str, Any]) -> None:
        """One communication kernel."""
        told = [args.get("In msg nelems"), args.get("Out msg nelems")]
        sizes = [n for n in told if isinstance(n, int) and 0 <= n < 2**50]
        plain = op.lower().replace("_", "")
        if not sizes:
            return
        if "allreduce" in plain and len(self.reduced) < _MOST:
            self.reduced.append((start, sizes[0]))
        elif "alltoall" in plain and len(self.routed) < _MOST:
            self.routed.append(max(sizes))

    def copy(self, name: str, length: float) -> None:
        """One copy between host and device."""
        for way in ("HtoD", "DtoH"):
            if way in name:
                self.copied[way] += length

    def numbers(self, steps: dict[int, tuple[float, float]]) -> dict[str, Any]:
        """The sums; what the trace has none of is absent."""
        out: dict[str, Any] = {}
        reduces: dict[str, list[int]] = {}
        for number, (begin, length) in sorted(steps.items())[:_STEPS]:
            own = [(s, n) for s, n in self.reduced if begin <= s < begin + length]
            if own:
                reduces[str(number)] = [n for _, n in sorted(own)]
        if reduces:
            out["reduces"] = reduces
        if self.routed:
            out["routed"] = round(sum(self.routed) / len(self.routed), 1)
        if self.copied:
            out["copies"] = {k: round(v, 3) for k, v in self.copied.items()}
        return out
