"""What a short run came to on each rank, and where it differs from what one process came to.

In: each rank's `Part`: losses, norms, and the fragments of gradients and weights that it holds.
Out: `Comparison`: the worst relative difference, and the first one beyond the bound, by name.
The order of looking is the order in which a fault spreads: per step the loss, the gradients from
the last layer to the first, the norm; then replicas among themselves, and the weights at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainer.place import Place


@dataclass(frozen=True)
class Fragment:
    """What a rank holds of a whole parameter."""

    values: np.ndarray
    """Flat."""
    place: Place


@dataclass
class Part:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """Losses of held-out samples, where evaluation is on."""
    gradients: list[dict[str, Fragment]] = field(default_factory=list)
    """By step and parameter, after clipping."""
    weights: dict[str, Fragment] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the whole parameters that this rank has a part of, in the order of forward."""
    extra: Any = None
    """Whatever else a test wants to bring home."""

    def whole(self, held: dict[str, Fragment]) -> dict[str, np.ndarray]:
        """The parameters of one process, in their shapes."""
        return {path: one.values.reshape(self.shapes[path]) for path, one in held.items()}


@dataclass(frozen=True)
class Difference:
    """One thing that is not what one process has."""

    what: str
    """loss, gradient, gradient norm, replicas, weight or evaluation; with the step where there is
    one."""
    parameter: str | None
    ranks: tuple[int, ...]
    relative: float

    @property
    def module(self) -> str | None:
        """The module that holds the parameter."""
        return self.parameter.rpartition(".")[0] if self.parameter else None

    def __str__(self) -> str:
        name = f" of {self.parameter}" if self.parameter else ""
        ranks = ",".join(map(str, self.ranks))
        return f"{self.what}{name} differs by {self.relative:.1e} on rank(s) {ranks}"


@dataclass(frozen=True)
class Comparison:
    """How far all ranks are from one process."""

    worst: Difference
    first: Difference | None
    """The first difference beyond the bound; None: equal."""


def compare(parts: Sequence[Part], true: Part, bound: float) -> Comparison:
    """Hold every rank's part against one process; `bound` is the largest relative difference.

    Relative to the largest true value of the same tensor: an element near 0 has no digits to lose.
    """
    found = list(_differences(parts, true))
    beyond = [one for one in found if not one.relative <= bound]
    return Comparison(max(found, key=_size), beyond[0] if beyond else None)


def _size(one: Difference) -> float:
    return float("inf") if np.isnan(one.relative) else one.relative


def _differences(parts: Sequence[Part], true: Part) -> Iterator[Difference]:
    for step, gradients in enumerate(true.gradients):
        yield _scalar(f"loss at step {step}", [p.losses[step] for p in parts], true.losses[step])
        held = [part.gradients[step] for part in parts]
        for path, value in reversed(true.whole(gradients).items()):
            yield _tensor(f"gradient at step {step}", path, held, value)
        yield _scalar(f"gradient norm at step {step}", [p.norms[step] for p in parts],
                      true.norms[step])  # fmt: skip
    held = [part.weights for part in parts]
    for path in true.weights:
        yield from _replicas(path, held)
    for path, value in true.whole(true.weights).items():
        yield _tensor("weight after the last step", path, held, value)
    for at, loss in enumerate(true.evaluations):
        yield _scalar(f"evaluation {at}", [part.evaluations[at] for part in parts], loss)


def _scalar(what: str, ours: list[float], true: float) -> Difference:
    apart = [_apart(np.array([one]), np.array([true]), abs(true)) for one in ours]
    return _worst(what, None, apart)


def _tensor(
    what: str, path: str, held: Sequence[dict[str, Fragment]], whole: np.ndarray
) -> Difference:
    scale = float(np.abs(whole).max())
    apart = [
        _apart(one[path].values, one[path].place.pick(whole), scale) if path in one else 0.0
        for one in held
    ]
    # Two ranks' stretches are the same or apart.
    seen = sum(place.count for place in {one[path].place for one in held if path in one})
    if seen < whole.size:
        return Difference(f"{what} (held in part)", path, tuple(range(len(held))), float("inf"))
    return _worst(what, path, apart)


def _replicas(path: str, held: Sequence[dict[str, Fragment]]) -> Iterator[Difference]:
    """Those that hold the same stretch must hold the same bits: else they drift apart."""
    known: dict[Place, tuple[int, np.ndarray]] = {}
    for rank, one in enumerate(held):
        if path in one:
            mine = one[path]
            first, values = known.setdefault(mine.place, (rank, mine.values))
            if not np.array_equal(values, mine.values):
                yield Difference("replicas", path, (first, rank), float("inf"))


def _worst(what: str, path: str | None, apart: list[float]) -> Difference:
    most = float(max(apart)) if not np.isnan(apart).any() else float("nan")
    ranks = tuple(rank for rank, one in enumerate(apart) if not one <= most / 2 or one == most)
    return Difference(what, path, ranks, most)


def _apart(ours: np.ndarray, true: np.ndarray, scale: float) -> float:
    if ours.shape != true.shape:
        return float("inf")
    return float(np.abs(ours - true).max(initial=0.0) / max(scale, 1e-300))
