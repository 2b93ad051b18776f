"""Unions of intervals of time: how long they last, what of one lies outside another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


def union(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Starts and ends of the disjoint intervals that cover the same times, in order."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order]) if order.size else end
    first = np.concatenate(([True], start[1:] > end[:-1])) if order.size else np.zeros(0, bool)
    last = np.append(first[1:], True) if order.size else first
    return start[first], end[last]


def length(start: Floats, end: Floats) -> float:
    """How long the union of the intervals lasts."""
    begin, until = union(start, end)
    return float((until - begin).sum())


def outside(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> float:
    """How long some interval of `one` lasts while none of `other` does: |A u B| - |B|."""
    both = length(np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1])))
    return both - length(*other)
