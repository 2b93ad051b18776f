"""A listener that writes down what a training program tells of itself."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Recorder:
    """Implements collectors.annotate.Listener."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.phases: list[tuple[int, str, int | None, int | None]] = []
        """(step, phase, microbatch, stage) in the order in which they began."""
        self.nested: list[str] = []
        """Phases that began inside another."""
        self.values: list[dict[str, float]] = []
        self.loads: list[tuple[int, int, tuple[float, ...], float]] = []
        """(step, layer, shares, dropped)."""
        self.groups: dict[str, str] = {}
        """Group name to axis."""
        self.coordinates: dict[str, int] = {}
        self.order: tuple[str, ...] = ()
        self._open = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.steps.append(number)
        yield

    @contextmanager
    def phase(self, name: str, microbatch: int | None, stage: int | None) -> Iterator[None]:
        if self._open:
            self.nested.append(name)
        self.phases.append((self.steps[-1] if self.steps else -1, name, microbatch, stage))
        self._open += 1
        yield
        self._open -= 1

    def numbers(self, values: Mapping[str, float]) -> None:
        self.values.append(dict(values))

    def expert_load(self, layer: int, shares: Sequence[float], dropped: float) -> None:
        self.loads.append((self.steps[-1], layer, tuple(shares), dropped))

    def group(self, name: str, axis: str) -> None:
        self.groups[name] = axis

    def mesh(self, coordinates: Mapping[str, int], order: tuple[str, ...]) -> None:
        self.coordinates, self.order = dict(coordinates), order
