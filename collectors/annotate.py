"""What a training program may tell whoever watches it, at no cost when nobody does.

In: the program's own knowledge (step, phase, the axis of a process group, loss, tokens).
Out: calls on the one listener that the agent installs; without a listener every call is a test of
one global and returns a shared do-nothing context.
It never imports torch, never raises into the program, never changes what the program computes.

    with annotate.step(7):
        with annotate.phase("forward", microbatch=0, stage=1):
            ...
    annotate.numbers(loss=2.1, grad_norm=0.4, tokens=4096)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

PHASES = (
    "data",
    "h2d",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "checkpoint",
    "evaluation",
    "compile",
    "other",
)
"""The phases of a step, as the `phases` table spells them."""

AXES = ("pp", "dp", "cp", "tp", "ep")
"""The axes of a mesh, as the `ranks` and `groups` tables spell them."""


class Listener(Protocol):
    """What the agent implements. Every method returns at once and never raises."""

    def step(self, number: int) -> AbstractContextManager[None]: ...

    def phase(
        self, name: str, microbatch: int | None, stage: int | None
    ) -> AbstractContextManager[None]: ...

    def numbers(self, values: Mapping[str, float]) -> None: ...

    def expert_load(self, layer: int, shares: Sequence[float], dropped: float) -> None: ...

    def group(self, name: str, axis: str) -> None: ...

    def mesh(self, coordinates: Mapping[str, int], order: tuple[str, ...]) -> None: ...


_NOTHING: AbstractContextManager[None] = nullcontext()
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Install the listener, or remove it with None."""
    global _listener
    _listener = listener


def listening() -> bool:
    """Whether anybody listens; lets a program skip the work of making a value."""
    return _listener is not None


def step(number: int) -> AbstractContextManager[None]:
    """The training step `number` (from 0, or from where a resumed run continues)."""
    return _NOTHING if _listener is None else _listener.step(number)


def phase(
    name: str, *, microbatch: int | None = None, stage: int | None = None
) -> AbstractContextManager[None]:
    """A stretch of one kind of work; `name` is one of PHASES."""
    return _NOTHING if _listener is None else _listener.phase(name, microbatch, stage)


def numbers(**values: float) -> None:
    """Numbers of the current step: loss, grad_norm, tokens, or the program's own names."""
    if _listener is not None:
        _listener.numbers(values)


def expert_load(layer: int, shares: Sequence[float], dropped: float) -> None:
    """Where the router of `layer` sent the current step's tokens, over all ranks: each expert's
    share of all choices (they sum to 1), and the share that found no place there."""
    if _listener is not None:
        _listener.expert_load(layer, shares, dropped)


def group(name: str, axis: str) -> None:
    """The axis of the process group called `name` (torch's `group_name`)."""
    if _listener is not None:
        _listener.group(name, axis)


def mesh(coordinates: Mapping[str, int], order: tuple[str, ...]) -> None:
    """This rank's coordinates on the mesh, and its axes from outermost to innermost."""
    if _listener is not None:
        _listener.mesh(coordinates, order)
