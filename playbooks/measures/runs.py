"""The same quantity in several runs: two logs, two sections, two columns, rows of a sweep.

In: Rows. Out: Runs with their settings (dp, accumulation, coefficient, ...) and series
{(quantity, name): {step: Point}}. A run is what shares a source, a section, the words that tell it
from others ("reference", "ours") and the settings of its rows. Values of single ranks are no run's.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from playbooks.measures import quantities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.finding import Item
    from playbooks.measures.values import Row, Value

KEPT = ("loss", "gradient", "weight", "auxiliary", "rate")
_LOCAL = re.compile(r"(?i)\blocal\b|per rank|before (?:the )?(?:all-?)?reduc|valid|eval\b|test\b")
_DERIVED = re.compile(r"[*\u00d7] ?\w| / \w")
_GPUS = re.compile(r"(?i)(\d+) ?(?:x ?)?(?:gpus?|h100s?|a100s?|ranks|processes|devices|cards)\b")
_SINGLE = re.compile(
    r"(?i)\b(?:one|single|1) (?:process|gpu|device|rank|card)\b|\b1gpu\b|\bsingle[- ]gpu\b|"
    r"\bun(?:sharded|distributed)\b|\bnon[- ]?distributed\b"
)


@dataclass(frozen=True)
class Point:
    """One value and its line."""

    value: float
    text: str
    item: Item


@dataclass
class Run:
    """One run."""

    label: str
    source: str
    section: int
    settings: dict[str, float]
    reference: bool = False
    series: dict[tuple[str, str], dict[int, Point]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """ "dp 8, accumulation 4", else its label."""
        told = [f"{k} {v:g}" for k, v in self.settings.items() if k != "seed"]
        return ", ".join(told[:4]) or self.label

    def names(self, quantity: str) -> list[str]:
        """Names with a series of this quantity."""
        return [n for q, n in self.series if q == quantity]


def read(rows: Sequence[Row]) -> list[Run]:
    """All runs that have a series, in the order of their first lines."""
    runs: dict[tuple[object, ...], Run] = {}
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for row in rows:
        for value in row.values:
            if value.quantity not in KEPT or _LOCAL.search(value.label):
                continue
            if _DERIVED.search(value.label):
                continue
            number = value.number
            if value.rank not in (None, 0) or number is None or not _is_one(value, number):
                continue
            settings = {**_told(value), **value.settings, **quantities.settings(value.rest)}
            variant = quantities.run_words(value.rest)
            key = (row.source, row.section, row.attempt, variant, tuple(sorted(settings.items())))
            run = runs.get(key)
            if run is None:
                label = variant or _short(row.about) or row.source
                run = runs[key] = Run(label, row.source, row.section, settings)
            run.reference = run.reference or value.reference or bool(_SINGLE.search(value.label))
            step = row.at("step")
            series = run.series.setdefault((value.quantity, _name(value)), {})
            spot = (key, value.quantity, _name(value))
            if step is None:
                step = counts[spot]
                counts[spot] += 1
            series.setdefault(step, Point(number, value.texts[0], row.item))
    return [r for r in runs.values() if r.series]


def _name(value: Value) -> str:
    """The subject, and words that are not of the run: "valid loss" is not "loss"."""
    rest = [w for w in value.rest.split() if not quantities.is_variant(w) and not w.isdigit()]
    return " ".join([value.name, *rest]).strip()


def _is_one(value: Value, number: float) -> bool:
    return len(value.texts) == 1 and math.isfinite(number)


def _told(value: Value) -> dict[str, float]:
    """World size that the label or its heading names: "8 GPUs", "single process"."""
    for text in (value.label, value.row.about):
        found = _GPUS.search(text)
        if found:
            return {"world": float(found.group(1))}
        if _SINGLE.search(text) and "|" not in text:
            return {"world": 1.0}
    return {}


def _short(text: str) -> str:
    return text.strip("=-#*> ")[:60]


@dataclass(frozen=True)
class Fit:
    """One series against another, step by step: their ratio and their difference."""

    ratio: float
    spread: float
    """Largest relative distance of a ratio from the median ratio."""
    offset: float
    offset_spread: float
    """Largest distance of a difference from the median difference."""
    signs: float
    """Share of steps on which the difference has the sign of the median difference."""
    points: int
    first: tuple[Point, Point]
    last: tuple[Point, Point]

    @property
    def equal(self) -> bool:
        """Within rounding: to a thousandth, on all steps."""
        return abs(self.ratio - 1) < 2e-3 and self.spread < 5e-3


def fit(one: Run, other: Run, quantity: str, name: str, most: int = 20) -> Fit | None:
    """`other` against `one` over their first common steps; None without any."""
    a, b = one.series.get((quantity, name)), other.series.get((quantity, name))
    if not a or not b:
        return None
    steps = sorted(a.keys() & b.keys())[:most]
    pairs = [(a[s], b[s]) for s in steps if a[s].value]
    if not pairs:
        return None
    ratios = [y.value / x.value for x, y in pairs]
    offsets = [y.value - x.value for x, y in pairs]
    ratio, offset = median(ratios), median(offsets)
    return Fit(
        ratio,
        max(abs(r - ratio) for r in ratios) / abs(ratio) if ratio else math.inf,
        offset,
        max(abs(o - offset) for o in offsets),
        sum((o > 0) == (offset > 0) for o in offsets) / len(offsets),
        len(pairs),
        pairs[0],
        pairs[-1],
    )


def typical(one: Run, other: Run, quantity: str) -> tuple[float, float, Fit] | None:
    """(ratio, spread over names and steps, a fit to show) of all series of a quantity."""
    fits = [f for n in one.names(quantity) if (f := fit(one, other, quantity, n, most=5))]
    if not fits:
        return None
    ratio = median(f.ratio for f in fits)
    if ratio <= 0:
        return None
    return ratio, max(max(abs(f.ratio / ratio - 1), f.spread) for f in fits), fits[0]
