"""What a benchmark reports: rows of `diag.bench/1`, and how noise is stated.

A ratio comes from pairs that ran next to each other, in alternating order; its bounds are the 95 %
interval of the median over resampled pairs (bootstrap, percentile method, fixed seed).
"""

from __future__ import annotations

import os
import platform
import random
import statistics
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One figure with its bounds, and a goal that it should stay below, or `at_least` reach."""

    case: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether all of the interval is on the good side of the goal; None: it is on both."""
        if self.goal is None:
            return None
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        below, above = high <= self.goal, low >= self.goal
        if below == above:  # astride, or all of it the goal itself
            return below or None
        return above if self.at_least else below

    def as_json(self) -> dict[str, Any]:
        """A row of `diag.bench/1`."""
        told = asdict(self)
        del told["at_least"]
        return {**told, "met": self.met}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the median and its 95 % bootstrap interval."""
    dice = random.Random(0)  # noqa: S311  resampling, no secret
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def paired(
    plain: Callable[[], T], watched: Callable[[], T], rounds: int
) -> tuple[list[T], list[T]]:
    """Measure both `rounds` times, side by side, swapping who goes first."""
    without: list[T] = []
    under: list[T] = []
    for number in range(rounds):
        order = [(plain, without), (watched, under)]
        for measure, results in order if number % 2 == 0 else reversed(order):
            results.append(measure())
    return without, under


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }
