"""Where the time of a step went, as logs tell it: by rank, stage, host or for the whole job.

In: events of kind train.timing. Out: Parts, one a report of one unit (rank 3 in step 100), with
values in seconds where that can be told, shares of the step, counts such as tokens. Lines of one
report are put together. Pure; decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from playbooks.lines import Event, Lines

COMM = ("allgather", "reducescatter", "allreduce", "a2a", "p2p", "comm")
DISJOINT = (
    "data",
    "copy",
    "fwdbwd",
    "forward",
    "backward",
    "compute",
    "recompute",
    "optimizer",
    "cpu_optimizer",
    "wait",
    "idle",
    "gc",
    "compile",
    "checkpoint",
    "evaluation",
    "other",
    *COMM,
)
"""Quantities that can be laid end to end in a step, unless a sum of some stands beside them."""
UNITS = ("rank", "ranks", "host", "gpu", "ep", "cp", "stage", "expert")


@dataclass
class Part:
    """What one unit did in one report."""

    who: dict[str, Any]
    step: int | None
    source: str
    values: dict[str, float] = field(default_factory=dict)
    """Seconds (after scaling) for times, plain numbers for counts."""
    shares: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    step_s: float | None = None
    events: list[Event] = field(default_factory=list)
    scaled: bool = True
    """Whether times are known to be seconds."""
    loose: set[str] = field(default_factory=set)
    """Times without a unit."""

    def time(self, quantity: str) -> float | None:
        """Seconds, or the table's own unit."""
        return self.values.get(quantity)

    @property
    def compute(self) -> float | None:
        """Forward and backward, or whatever the source calls compute."""
        for names in (("fwdbwd",), ("forward", "backward"), ("compute",)):
            found = [self.values[n] for n in names if n in self.values]
            if found:
                return sum(found)
        return None

    @property
    def whole(self) -> float | None:
        """The step, told or by the sum of its parts."""
        if self.step_s:
            return self.step_s
        return self.total or None

    @property
    def total(self) -> float:
        """The sum of parts that do not overlap; 0 where no compute is among several."""
        used = {q: v for q, v in self.values.items() if q in DISJOINT}
        if "fwdbwd" in used:
            used.pop("forward", None)
            used.pop("backward", None)
        if "fwdbwd" in used or "forward" in used or "backward" in used:
            used.pop("compute", None)
        if "wait" in used and any("wait" in self.names.get(q, "") for q in COMM):
            used.pop("wait")
        several = len(used) > 1 and self.compute is not None
        return sum(used.values()) if several else 0.0

    def share(self, *quantities: str) -> float | None:
        """Share of the step that these take together; None where none is told."""
        out = []
        for quantity in quantities:
            if quantity in self.shares:
                out.append(self.shares[quantity])
            elif quantity in self.values and self.whole and (self.scaled or not self.step_s):
                out.append(self.values[quantity] / self.whole)
        return sum(out) if out else None


class Breakdown:
    """All parts of a pile."""

    def __init__(self, lines: Lines) -> None:
        self.parts = list(_parts(lines.of("train.timing")))
        for part in self.parts:
            _scale(part)

    def of(self, unit: str) -> dict[Any, list[Part]]:
        """Parts of each rank (or stage, host, ...), those of stages of a rank under the rank."""
        out: dict[Any, list[Part]] = defaultdict(list)
        for part in self.parts:
            key = part.who.get(unit)
            if key is not None:
                out[tuple(key) if isinstance(key, list) else key].append(part)
        return dict(out)

    @property
    def overall(self) -> list[Part]:
        """Parts of no unit, or of a rank that alone speaks for all."""
        ranks = self.of("rank")
        alone = len(ranks) == 1
        return [
            p
            for p in self.parts
            if not any(u in p.who for u in UNITS if not (u == "rank" and alone))
        ]

    def typical(self, *quantities: str) -> float | None:
        """Median share of the step over all parts of ranks or the job."""
        found = [s for p in self.parts if (s := p.share(*quantities)) is not None]
        return median(found) if found else None


def _parts(events: Iterable[Event]) -> Iterable[Part]:
    open_parts: dict[tuple[Any, ...], Part] = {}
    for event in events:
        who = event.fields.get("who")
        values = event.fields.get("values")
        if not isinstance(who, dict) or not isinstance(values, list):
            continue
        if event.rank is not None and not any(u in who for u in UNITS):
            who = {"rank": event.rank, **who}
        step = event.fields.get("step")
        source = str(event.row["source"] or "")
        place = (source, *sorted((k, str(v)) for k, v in who.items()))
        told = {str(v[0]) + str(v[3]) for v in values if isinstance(v, list) and len(v) == 4}
        part = open_parts.get(place)
        if part is None or part.step != step or told & {q + n for q, n in part.names.items()}:
            if part is not None:
                yield part
            part = open_parts[place] = Part(who, step, source)
        _add(part, event, values)
        yield from _lists(event, part)
    yield from open_parts.values()


def _add(part: Part, event: Event, values: list[Any]) -> None:
    part.events.append(event)
    told = event.number("step_s")
    part.step_s = part.step_s if told is None else told
    seen: set[str] = set()
    for entry in values:
        if not isinstance(entry, list) or len(entry) != 4:
            continue
        quantity, value, unit, name = entry
        if not isinstance(value, int | float):
            continue
        if quantity == "step":
            bare = unit == "" and part.step_s is None
            part.step_s = float(value) if unit == "s" or bare else part.step_s
        elif unit == "share":
            part.shares.setdefault(quantity, float(value))
        else:
            old = part.values.get(quantity, 0.0)
            summed = quantity in COMM and quantity in seen
            part.values[quantity] = old + value if summed else max(old, float(value))
            if unit == "" and quantity in DISJOINT:
                part.loose.add(quantity)
        part.names.setdefault(quantity, str(name))
        seen.add(str(quantity))


def _lists(event: Event, whole: Part) -> Iterable[Part]:
    """A list by rank or stage is a part of each of them."""
    lists = event.fields.get("lists")
    for key, numbers in lists.items() if isinstance(lists, dict) else ():
        quantity, _, axis = str(key).partition("/")
        if axis not in UNITS or not isinstance(numbers, list):
            continue
        for index, value in enumerate(numbers[:4096]):
            if isinstance(value, int | float):
                part = Part({axis: index}, whole.step, whole.source, {quantity: float(value)})
                part.step_s, part.events = whole.step_s, [event]
                part.loose = {quantity} if quantity in DISJOINT else set()
                yield part


def _scale(part: Part) -> None:
    """Times without a unit are in that of the step if they then fit into it."""
    if not part.loose:
        return
    part.scaled = False
    if any(q in part.values and q not in part.loose for q in DISJOINT):
        fixed = max(part.values[q] for q in DISJOINT if q in part.values and q not in part.loose)
    else:
        fixed = 0.0
    whole = part.step_s or fixed
    rough = sum(part.values[q] for q in part.loose)
    for factor in (1.0, 1e-3, 1e-6):
        if whole and rough and 1e-3 * whole < rough * factor <= 1.3 * whole:
            for quantity in part.loose:
                part.values[quantity] *= factor
            part.scaled = True
            return
