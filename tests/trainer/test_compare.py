"""What counts as a difference, in numbers made up here; ranks that really train are elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.parity.bounds import EPS, bounds
from trainer.parity.compare import compare
from trainer.parity.outcome import Fragment, Output, Part, Step
from trainer.place import Place

EXACT = bounds("float64", 8)


def held(**values: object) -> dict[str, Fragment]:
    """Whole parameters, by path (with _ for the dot)."""
    found = {}
    for name, value in values.items():
        array = np.asarray(value, dtype=np.float64)
        found[name.replace("_", ".")] = Fragment(array.ravel(), Place.of_all(array.shape))
    return found


def part(gradient: object, weight: object, *, key: object = (0.0, 0.0)) -> Part:
    """One step in which the weights of `a` and the bias of `k` were updated."""
    start = held(a_weight=[[1.0, 2.0], [3.0, 4.0]], k_bias=[0.0, 0.0])
    gradients = held(a_weight=gradient, k_bias=[1e-17, -1e-17])
    weights = held(a_weight=weight, k_bias=key)
    step = Step(1.0, 2.0, 8, gradients=gradients, clipped=gradients, weights=weights)
    return Part({"a.weight": (2, 2), "k.bias": (2,)}, start, [step])


GRADIENT = [[0.1, -0.2], [0.3, 0.1]]
WEIGHT = [[0.999, 2.001], [2.999, 3.999]]


def test_half_an_update_does_not_hide_behind_a_large_weight() -> None:
    true = part(GRADIENT, WEIGHT)
    half = part(GRADIENT, [[0.9995, 2.0005], [2.9995, 3.9995]])
    first = compare([true, half], true, EXACT).first
    assert first is not None
    assert (first.what, first.parameter, first.ranks) == ("weight after step 0", "a.weight", (1,))
    assert first.relative == pytest.approx(0.5)


def test_weights_whose_gradient_is_rounding_are_left_out_and_said() -> None:
    """Such as the bias of keys, which softmax cancels; Adam makes an update of its noise."""
    true = part(GRADIENT, WEIGHT, key=[1e-3, -1e-3])
    other = part(GRADIENT, WEIGHT, key=[-1e-3, 1e-3])
    verdict = compare([other], true, EXACT)
    assert verdict.first is None
    assert verdict.left_out == ("k.bias",)


def test_replicas_must_be_the_same_to_the_last_bit() -> None:
    true = part(GRADIENT, WEIGHT)
    drifted = part(GRADIENT, np.array(WEIGHT) + 1e-15)
    first = compare([true, drifted], true, EXACT).first
    assert first is not None
    assert (first.what, first.ranks) == ("replicas after step 0", (0, 1))


def test_what_no_rank_holds_is_a_difference() -> None:
    true, some = part(GRADIENT, WEIGHT), part(GRADIENT, WEIGHT)
    cut = Place.of_all((2, 2)).cut(0, 0, 2)
    some.steps[0].gradients["a.weight"] = Fragment(np.array([0.1, -0.2]), cut)
    first = compare([some], true, EXACT).first
    assert first is not None
    assert first.what == "gradient at step 0 (held in part)"


def test_a_loss_that_is_no_number_is_a_difference() -> None:
    true, broken = part(GRADIENT, WEIGHT), part(GRADIENT, WEIGHT)
    broken.steps[0].loss = float("nan")
    first = compare([true, broken], true, EXACT).first
    assert first is not None
    assert (first.what, first.ranks) == ("loss at step 0", (1,))


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("products", [1, 30, 1000, 10**6])
def test_no_bound_hides_a_factor_of_two(dtype: str, products: int) -> None:
    found = bounds(dtype, products)
    assert EPS[dtype] < found.computed <= found.later < 0.5
    assert all((found.weight(elements) or 0) < 0.5 for elements in (1, 10, 1000, 10**6))


def test_an_element_whose_sign_is_chance_is_no_difference_and_too_few_are_not_compared() -> None:
    """Adam makes the same update of a gradient of 1e-12 as of one of 1, with its sign."""
    assert bounds("float64", 30).weight(8) == 1e-10
    one_flipped = 2 / np.sqrt(32)
    assert bounds("float32", 30).weight(32) > one_flipped
    assert bounds("float32", 30).weight(8) is None
    assert bounds("bfloat16", 30).weight(32) is None
    assert bounds("bfloat16", 30).weight(1024) is not None


def outputs(text: Part, ours: list[list[Output]], true: list[Output]) -> list[Part]:
    """Ranks that differ from `text` in the outputs of module `m` only."""
    text.steps[0].outputs = {"m": true}
    found = []
    for one in ours:
        found.append(part(GRADIENT, WEIGHT))
        found[-1].steps[0].outputs = {"m": one}
    return found


WHOLE = np.arange(2 * 8 * 4, dtype=np.float64).reshape(2, 8, 4)
ALL = np.arange(8)


def test_outputs_are_found_in_the_whole_by_shape() -> None:
    """Samples by microbatch, positions by cp and then tp, the last size by tp."""
    zigzag = [np.array([0, 1, 6, 7]), np.array([2, 3, 4, 5])]
    true = part(GRADIENT, WEIGHT)
    ours = [
        [
            Output(WHOLE[first : first + 1, rows][:, 2 * tp : 2 * tp + 2], first, rows, (tp, 2))
            for first in (0, 1)
        ]
        for rows in zigzag
        for tp in (0, 1)
    ]
    parts = outputs(true, ours, [Output(WHOLE, 0, ALL, (0, 1))])
    verdict = compare(parts, true, EXACT)
    assert (verdict.first, verdict.modules, verdict.left_out) == (None, 1, ("k.bias",))
    ours[2][1].values[0, 0, 0] += 10
    first = compare(parts, true, EXACT).first
    assert first is not None
    assert (first.what, first.module, first.ranks) == ("output at step 0", "m", (2,))


def test_outputs_that_are_no_part_of_a_whole_are_left_out_and_said() -> None:
    true = part(GRADIENT, WEIGHT)
    lost = Output(np.zeros((1, 3, 4)), 0, ALL, (0, 2))
    (one,) = outputs(true, [[lost]], [Output(WHOLE, 0, ALL, (0, 1))])
    verdict = compare([one], true, EXACT)
    assert verdict.first is None
    assert (verdict.modules, verdict.left_out) == (0, ("m", "k.bias"))
