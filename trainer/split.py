"""Which layers make a stage: evenly, as told, or balanced by what layers cost.

In: numbers of layers and stages, a list, or measured costs. Out: a range of layers for each stage.
Every stage has at least one layer. Arithmetic only, no torch: a wrong list is refused before
anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Load:
    """What one part of the model asks of the stage that has it."""

    seconds: float
    """Forward and backward of one microbatch."""
    state: float
    """Bytes of weights, gradients and optimizer."""
    activations: float
    """Bytes that a microbatch in flight keeps."""


@dataclass(frozen=True)
class Loads:
    """Of all parts."""

    layers: tuple[Load, ...]
    first: tuple[Load, ...]
    """Of what the first stage has beside layers: the embedding."""
    last: tuple[Load, ...]
    """Of what the last stage has beside layers: norm, head, loss."""


def layers_among(parts: Sequence[str]) -> range:
    """Which parts of a chain are layers, by their paths: those inside a container, else all."""
    inside = [at for at, path in enumerate(parts) if "." in path] or list(range(len(parts)))
    return range(inside[0], inside[-1] + 1)


def even(layers: int, stages: int) -> list[range]:
    """As even as can be; where layers do not divide, early stages are shorter.

    The last stage has the head and the loss and the first only a lookup, yet 1F1B keeps the most
    activations alive in the first: a layer less there saves memory where it is scarcest.
    """
    return _ranges([layers * stage // stages for stage in range(stages + 1)])


def listed(counts: Sequence[int]) -> list[range]:
    """So many layers each."""
    return _ranges([0, *accumulate(counts)])


def nearest(counts: Sequence[int], layers: int, stages: int) -> list[int]:
    """Counts that fit, shaped as those asked for: shares rounded so that none is below 1."""
    asked = [max(1, one) for one in counts[:stages]]
    asked += [max(1, round(sum(asked) / max(1, len(asked))))] * (stages - len(asked))
    free = layers - stages
    shares = [free * (one - 1) / max(1, sum(asked) - stages) for one in asked]
    out = [1 + int(share) for share in shares]
    behind = sorted(range(stages), key=lambda at: (int(shares[at]) - shares[at], at))
    for turn in range(layers - sum(out)):
        out[behind[turn % stages]] += 1
    return out


def balanced(loads: Loads, in_flight: Sequence[int], limit: float = 0.0) -> list[range] | None:
    """The contiguous split whose slowest stage is fastest; ties: the least time of those before.

    `in_flight` are the microbatches that each stage holds at once. With a `limit`, no stage may
    need more bytes; None where no split keeps to it. Exact, by dynamic programming over the stages
    that are left: stages x layers^2 steps.
    """
    layers, stages = len(loads.layers), len(in_flight)

    @cache
    def best(stage: int, start: int) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
        """(seconds of the stages from `stage` on, slowest first; where each begins), from start."""
        left = stages - stage - 1
        found = None
        for stop in [layers] if not left else range(start + 1, layers - left + 1):
            seconds, size = need(loads, range(start, stop), stage, in_flight)
            if limit and size > limit:
                continue
            rest = best(stage + 1, stop) if left else ((), ())
            if rest is None:
                continue
            one = (tuple(sorted((seconds, *rest[0]), reverse=True)), (start, *rest[1]))
            found = min(found or one, one)
        return found

    chosen = best(0, 0)
    return None if chosen is None else _ranges([*chosen[1], layers])


def need(loads: Loads, own: range, stage: int, in_flight: Sequence[int]) -> tuple[float, float]:
    """(seconds a microbatch, bytes) of a stage with these layers."""
    parts = [loads.layers[layer] for layer in own]
    parts += loads.first if stage == 0 else ()
    parts += loads.last if stage == len(in_flight) - 1 else ()
    size = sum(one.state + one.activations * in_flight[stage] for one in parts)
    return sum(one.seconds for one in parts), size


def _ranges(bounds: Sequence[int]) -> list[range]:
    return [range(start, stop) for start, stop in pairwise(bounds)]
