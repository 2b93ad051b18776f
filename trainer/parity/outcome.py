"""What a short run came to on each rank: what it held, saw and updated, and of what each is a part.

In: nothing; `train.py` fills a `Part` on every rank. Out: plain arrays that travel to the process
which compares them (`compare.py`), so no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from trainer.place import Place


@dataclass(frozen=True)
class Fragment:
    """What a rank holds of a whole parameter."""

    values: np.ndarray
    """Flat, float64 whatever the run computes in."""
    place: Place


@dataclass(frozen=True)
class Output:
    """What a module returned for one microbatch on one rank."""

    values: np.ndarray
    """(samples, positions or the tp rank's share, size or its share)."""
    first: int
    """The first of its samples in the global batch."""
    positions: np.ndarray
    """The positions of the sequence that the rank holds, before tp shares them."""
    share: tuple[int, int]
    """The rank's index on tp, and the size of tp."""


@dataclass
class Step:
    """One optimizer step of one rank."""

    loss: float = 0.0
    norm: float = 0.0
    tokens: int = 0
    gradients: dict[str, Fragment] = field(default_factory=dict)
    """Summed over all ranks, before clipping, by parameter."""
    clipped: dict[str, Fragment] = field(default_factory=dict)
    """What the optimizer was given."""
    weights: dict[str, Fragment] = field(default_factory=dict)
    """After the update."""
    evaluation: float | None = None
    """Loss on held-out samples after the update; None where the step has none."""
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    """By module, in the order in which they first ended; empty unless asked for."""


@dataclass
class Part:
    """What one rank saw."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the whole parameters that this rank has a part of, in the order of forward."""
    start: dict[str, Fragment] = field(default_factory=dict)
    """The weights before the first step."""
    steps: list[Step] = field(default_factory=list)
    extra: Any = None
    """Whatever else a test wants to bring home."""

    @property
    def losses(self) -> list[float]:
        """By step."""
        return [step.loss for step in self.steps]

    @property
    def norms(self) -> list[float]:
        """By step, before clipping."""
        return [step.norm for step in self.steps]

    @property
    def tokens(self) -> list[int]:
        """Valid ones of the global batch, by step."""
        return [step.tokens for step in self.steps]

    def whole(self, held: dict[str, Fragment]) -> dict[str, np.ndarray]:
        """The parameters of one process, in their shapes."""
        return {path: one.values.reshape(self.shapes[path]) for path, one in held.items()}
