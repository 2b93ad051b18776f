"""How far rounding alone may take a layout from one process; more is a bug.

In: the arithmetic and the number of matrix products in a model. Out: `Bounds`, on differences as
`compare.py` measures them (relative Frobenius norms).

    float64   1e-10 for everything. Rounding leaves 1e-15 in a gradient and 1e-12 in a weight; the
              smallest wrong factor known, a loss divided by local tokens, 1e-4.

    else      b = 3 x eps/2 x sqrt(2 M), for all that is computed with the weights of the start:
              each of M products rounds its result once forward and once backward, by at most eps/2,
              and 2 M independent roundings add up like a random walk. The 3 is for what is rounded
              between the products, and for being the largest over all tensors; measured over the
              matrix: at most 5.5 eps in float32 and 1.3 eps in bfloat16, where b is 11.6 eps.

              sqrt(b) + 2 / sqrt(n) for the change of a weight of n elements. Adam moves an element
              by lr x g / |g|, so where |g| is below the rounding of its tensor, b x rms(g), its
              sign is chance: that is a share of about b of all elements, wrong by twice the update,
              and so sqrt(b) in norm; the rest is for one such element where n is small. Measured:
              1e-3 for the norms of 32 elements and 1.4e-4 else in float32 (sqrt(b) is 1.2e-3), 0.18
              in bfloat16 (0.30). Where this is above 0.4, chance decides, and nothing is compared.

              10 sqrt(b) for all that is computed with such weights, from the second step on: the
              one element may be a norm's, which every position passes. Measured: 5e-5 in float32,
              0.09 in bfloat16.

No bound is above 0.4: half or twice the true value is a difference of 0.5 or more, so that a wrong
factor of 2 in a gradient is seen in bfloat16 and at any depth. (Smaller faults need float64: hence
the default.) Sums over very long sequences round more than these; a proof needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number."""
_EXACT = 1e-10
_MOST = 0.4
_LATER = 10


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences that are no bug."""

    computed: float
    """Of outputs, loss and gradients of the first step."""
    later: float
    """Of the same once weights were updated."""
    chance: float
    """sqrt(b), the share of an update whose sign is chance; 0 where there is none."""
    noise: float
    """A gradient so small beside the mean of all is what rounding leaves of terms that cancel."""

    def at(self, step: int) -> float:
        """Of what step `step` computes before its update."""
        return self.later if step else self.computed

    def weight(self, elements: int) -> float | None:
        """Of the change of a weight; None: too few elements to tell a bug from chance."""
        if not self.chance:
            return self.later
        bound = self.chance + 2 / math.sqrt(elements)
        return bound if bound <= _MOST else None


def bounds(dtype: str, products: int) -> Bounds:
    """For `dtype` (a key of EPS) and a model of `products` matrices."""
    eps = EPS[dtype]
    if dtype == "float64":
        return Bounds(_EXACT, _EXACT, 0.0, eps)
    once = 3 * eps / 2 * math.sqrt(2 * products)
    chance = math.sqrt(once)
    return Bounds(min(once, _MOST), min(_LATER * chance, _MOST), chance, eps)
