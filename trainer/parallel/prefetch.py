"""ZeRO-3: which units have their values here, and which are fetched before they are needed.

In: `use(unit)` and `done(unit)` around each forward and each backward of a unit, in whatever order
the pipeline's schedule has them. Out: a unit's values are here between the two.
A step uses its units in the order of the step before: the order is learned, so that one rule serves
forward and backward, interleaved microbatches, virtual stages and recomputation. All ranks that
share a unit run the same schedule, so their gathers come in the same order.

    uses      ... layers.2 F   head F   head B   layers.2 B ...
    ahead=1       [gather head ][kept  ][gather layers.2]          at most ahead + 2 are here: in
                                                                   backward one may still wait for
                                                                   its last gradient
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Gathered(Protocol):
    """What can be fetched and freed, each any number of times in a row."""

    def fetch(self) -> None:
        """Begin to have the values here."""

    def arrive(self) -> None:
        """Return when they may be used."""

    def free(self) -> None:
        """Give their memory back."""


class Prefetch:
    """Follows the order of a step, `ahead` uses in advance."""

    def __init__(self, units: Sequence[Gathered], ahead: int) -> None:
        self.units = units
        self.ahead = ahead
        self._order: list[Gathered] = []
        """The uses of the last whole step."""
        self._seen: list[Gathered] | None = None
        """The uses of this step; None outside of one: in evaluation nothing is fetched early."""
        self._known = False
        """Whether this step has followed the order until now."""

    def start(self) -> None:
        """Begin a step."""
        self._seen = []
        self._known = True

    def use(self, unit: Gathered) -> None:
        """The unit's values are needed now."""
        if self._seen is not None:
            at = len(self._seen)
            self._known = self._known and at < len(self._order) and self._order[at] is unit
            self._seen.append(unit)
        unit.fetch()
        for later in self._coming():
            later.fetch()
        unit.arrive()

    def done(self, unit: Gathered) -> None:
        """They are no longer needed, but for a use that comes next."""
        if unit not in self._coming():
            unit.free()

    def end(self) -> None:
        """End a step: the values change, so nothing that was gathered may stay."""
        if self._seen is not None:
            self._order = self._seen
        self._seen = None
        for unit in self.units:
            unit.free()

    def _coming(self) -> list[Gathered]:
        if self._seen is None or not self._known:
            return []
        at = len(self._seen)
        return self._order[at : at + self.ahead]
