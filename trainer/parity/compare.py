"""Where a run on many ranks differs from the same run in one process, and what differs first.

In: each rank's `Part`, the one of one process, and how far apart rounding alone may take them.
Out: `Comparison`: the worst relative difference, and the first one beyond its bound, by name.
The order of looking is the order in which a fault spreads: the weights at the start; per step the
outputs in the order of forward, the loss, the gradients from the last layer to the first, the norm,
the clipped gradients, the weights, whether replicas are still the same, and the evaluation.

A difference is a relative Frobenius norm: the root mean square of what a rank has wrong, over that
of the true tensor (of its change, for weights: a wrong update must not hide behind a large weight).
A tensor that is small beside the others has fewer digits to lose, since it is a sum of terms of
their size: each counts at least as a tenth of the mean over all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.parity.layers import output_differences, unplaced
from trainer.parity.verdict import Comparison, Difference, apart, of_parameter, over_ranks, rms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainer.parity.bounds import Bounds
    from trainer.parity.outcome import Fragment, Part, Step
    from trainer.place import Place

    Held = Sequence[Mapping[str, Fragment]]
    Whole = Mapping[str, np.ndarray]

_LEAST = 0.1
"""Of the root mean square over all tensors, the least that one is taken for."""


def compare(parts: Sequence[Part], true: Part, bounds: Bounds) -> Comparison:
    """Hold every rank's part against one process."""
    chance: set[str] = set()
    found = list(_differences(parts, true, bounds, chance))
    worst = max(found, key=lambda one: np.inf if np.isnan(one.relative) else one.relative)
    first = next((one for one in found if one.beyond), None)
    known = true.steps[0].outputs
    left = unplaced([part.steps[0].outputs for part in parts], known)
    return Comparison(worst, first, len(known) - len(left), (*left, *sorted(chance)))


def _differences(
    parts: Sequence[Part], true: Part, bounds: Bounds, chance: set[str]
) -> Iterator[Difference]:
    """All, in the order of looking; into `chance` go weights that rounding decides."""
    start = true.whole(true.start)
    scales = {path: rms(value) for path, value in start.items()}
    yield from _tensors("weight at the start", [p.start for p in parts], start, scales, 0.0)
    for number, step in enumerate(true.steps):
        held = [part.steps[number] for part in parts]
        outputs = [one.outputs for one in held]
        yield from output_differences(number, outputs, step.outputs, bounds.at(number))
        yield from _gradients(number, held, true, bounds)
        chance |= _drowned(true, step, bounds.noise)
        yield from _weights(number, held, true, bounds, chance)
        for path in step.weights:
            yield from _replicas(f"replicas after step {number}", path, [p.weights for p in held])
        if step.evaluation is not None:
            ours = [np.nan if one.evaluation is None else one.evaluation for one in held]
            yield _number(f"evaluation after step {number}", ours, step.evaluation, bounds.later)


def _weights(
    number: int, held: Sequence[Step], true: Part, bounds: Bounds, chance: set[str]
) -> Iterator[Difference]:
    """The weights after a step, relative to how far they have come."""
    start, weights = true.whole(true.start), true.whole(true.steps[number].weights)
    change = _scales({path: value - start[path] for path, value in weights.items()})
    where = [one.weights for one in held]
    for path, value in weights.items():
        sizes = [one[path].values.size for one in where if path in one]
        bound = bounds.weight(min(sizes, default=value.size))
        if bound is None:
            chance.add(path)
        if bound is not None and path not in chance:
            what = f"weight after step {number}"
            yield from _tensors(what, where, {path: value}, change, bound)


def _gradients(
    number: int, held: Sequence[Step], true: Part, bounds: Bounds
) -> Iterator[Difference]:
    """Loss, gradients, norm and clipped gradients of a step."""
    step, bound = true.steps[number], bounds.at(number)
    loss = [one.loss for one in held]
    yield _number(f"loss at step {number}", loss, step.loss, bounds.at(number))
    whole = _backward(true.whole(step.gradients))
    ours = [one.gradients for one in held]
    yield from _tensors(f"gradient at step {number}", ours, whole, _scales(whole), bound)
    norms = [one.norm for one in held]
    yield _number(f"gradient norm at step {number}", norms, step.norm, bound)
    whole = _backward(true.whole(step.clipped))
    ours = [one.clipped for one in held]
    yield from _tensors(f"clipped gradient at step {number}", ours, whole, _scales(whole), bound)


def _backward(whole: Whole) -> dict[str, np.ndarray]:
    """In the order in which backward reaches them."""
    return dict(reversed(list(whole.items())))


def _scales(whole: Whole) -> dict[str, float]:
    """What each tensor's differences are relative to."""
    least = _LEAST * _overall(whole)
    return {path: max(rms(value), least) for path, value in whole.items()}


def _overall(whole: Whole) -> float:
    """Root mean square over all elements of all tensors."""
    return rms(np.concatenate([value.ravel() for value in whole.values()]))


def _drowned(true: Part, step: Step, noise: float) -> set[str]:
    """Parameters whose true gradient is zero but for rounding, such as the bias of keys.

    Adam divides it by its own size, so that an update of rounding is as large as any other.
    """
    gradients = true.whole(step.gradients)
    least = noise * _overall(gradients)
    return {path for path, value in gradients.items() if rms(value) <= least}


def _number(what: str, ours: list[float], true: float, bound: float) -> Difference:
    each = [apart(np.array([one]), np.array([true]), abs(true)) for one in ours]
    return over_ranks(what, None, None, each, bound)


def _tensors(
    what: str, held: Held, whole: Whole, scales: Mapping[str, float], bound: float
) -> Iterator[Difference]:
    for path, value in whole.items():
        each = [
            apart(one[path].values, one[path].place.pick(value), scales[path])
            if path in one
            else 0.0
            for one in held
        ]
        # Two ranks' stretches are the same or apart.
        seen = sum(place.count for place in {one[path].place for one in held if path in one})
        if seen < value.size:
            each = [np.inf] * len(held)
            yield of_parameter(f"{what} (held in part)", path, each, bound)
        yield of_parameter(what, path, each, bound)


def _replicas(what: str, path: str, held: Held) -> Iterator[Difference]:
    """Those that hold the same stretch must hold the same bits: else they drift apart."""
    known: dict[Place, tuple[int, np.ndarray]] = {}
    for rank, one in enumerate(held):
        if path in one:
            mine = one[path]
            first, values = known.setdefault(mine.place, (rank, mine.values))
            if not np.array_equal(values, mine.values):
                module = path.rpartition(".")[0]
                yield Difference(what, module, path, (first, rank), np.inf, 0.0)
