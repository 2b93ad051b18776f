"""One difference between many ranks and one process, and how far apart two tensors are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Difference:
    """One thing that is not quite what one process has."""

    what: str
    """weight, output, loss, gradient, gradient norm, clipped gradient or replicas, and when."""
    module: str | None
    parameter: str | None
    """By its path in the whole model."""
    ranks: tuple[int, ...]
    """Those that are wrong, or for replicas those that disagree."""
    relative: float
    bound: float
    """As far as rounding may take it."""

    @property
    def beyond(self) -> bool:
        """Whether it is more than rounding; what is no number is."""
        return not self.relative <= self.bound

    def __str__(self) -> str:
        if not self.ranks:
            return self.what
        path = self.parameter or self.module
        ranks = ",".join(map(str, self.ranks))
        by = "" if np.isinf(self.relative) else f" by {self.relative:.1e}"
        return f"{self.what}{f' of {path}' if path else ''} differs{by} on rank(s) {ranks}"


@dataclass(frozen=True)
class Comparison:
    """How far all ranks are from one process."""

    worst: Difference
    first: Difference | None
    """The first difference beyond its bound; None: equal."""
    modules: int = 0
    """Whose outputs were compared."""
    left_out: tuple[str, ...] = ()
    """What could not be compared: outputs of modules that are no part of a whole (a share of a sum,
    tokens sent elsewhere), and weights whose update rounding decides."""


def of_parameter(what: str, path: str, ours: Sequence[float], bound: float) -> Difference:
    """The largest of what the ranks have wrong in a parameter."""
    return over_ranks(what, path.rpartition(".")[0], path, ours, bound)


def over_ranks(
    what: str, module: str | None, parameter: str | None, ours: Sequence[float], bound: float
) -> Difference:
    """The largest of the ranks' differences; wrong are those beyond the bound, else the worst."""
    most = float("nan") if np.isnan(ours).any() else float(max(ours))
    wrong = [rank for rank, one in enumerate(ours) if not one <= bound]
    ranks = wrong or [rank for rank, one in enumerate(ours) if one == most]
    return Difference(what, module, parameter, tuple(ranks), most, bound)


def apart(ours: np.ndarray, true: np.ndarray, scale: float) -> float:
    """Root mean square of the difference, in units of `scale`."""
    if ours.shape != true.shape:
        return float("inf")
    return rms(ours - true) / max(scale, 1e-300)


def rms(values: np.ndarray) -> float:
    """Root mean square; 0 of nothing."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
