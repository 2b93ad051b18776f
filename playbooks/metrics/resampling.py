"""How sure a ratio of two series of measurements is, without assuming their distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_FEWEST = 5
"""Values a series needs: an interval from fewer would say more than is known."""
_DRAWS = 1000


@dataclass(frozen=True)
class Ratio:
    """median(b) / median(a), with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def ratio(a: Floats, b: Floats) -> Ratio | None:
    """The ratio of the medians of two series in order of time; None where they are too short.

    Moving-block bootstrap (Kuensch 1989): steps that follow each other are alike, so blocks of
    sqrt(n) of them are drawn rather than single ones. Seeded: the same input, the same answer.
    """
    if min(a.size, b.size) < _FEWEST or not float(np.median(a)) > 0:
        return None
    chance = np.random.default_rng(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = _medians(b, chance) / _medians(a, chance)
    drawn = drawn[np.isfinite(drawn)]
    if not drawn.size:
        return None
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(float(np.median(b) / np.median(a)), float(low), float(high))


def _medians(values: Floats, chance: np.random.Generator) -> Floats:
    """The median of each resample."""
    block = max(1, round(math.sqrt(values.size)))
    count = -(-values.size // block)
    starts = chance.integers(0, values.size - block + 1, size=(_DRAWS, count))
    places = (starts[:, :, None] + np.arange(block)).reshape(_DRAWS, -1)[:, : values.size]
    found: Floats = np.median(values[places], axis=1)
    return found
