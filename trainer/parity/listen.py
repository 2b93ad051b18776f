"""Takes down what a step of this rank does, at the moments that `collectors.annotate` tells.

In: a Trainer, and a listener that shall hear all of it too. Out: a `Step` for each step: the
gradients before clipping, and on request what every module returned in forward (not when it is
repeated in backward), for which the microbatch must be known. Nothing that is computed changes.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from collectors import annotate
from trainer.parallel.context import positions
from trainer.parity.outcome import Fragment, Output, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from trainer.loop import Trainer
    from trainer.place import Place


class Watch:
    """Listens while its context is open. Implements collectors.annotate.Listener."""

    def __init__(
        self, trainer: Trainer, *, layers: bool, then: annotate.Listener | None = None
    ) -> None:
        self.current = Step()
        self._trainer = trainer
        self._then = then
        self._microbatch: int | None = None
        """None: not in a forward."""
        self._hooks = [
            module.register_forward_hook(partial(self._returned, path))
            for path, module in (_modules(trainer) if layers else ())
        ]

    def __enter__(self) -> Self:
        annotate.listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        annotate.listen(self._then)
        for hook in self._hooks:
            hook.remove()

    def _returned(self, path: str, _module: nn.Module, _args: Any, out: Any) -> None:
        if self._microbatch is None or not isinstance(out, Tensor):
            return
        train, mesh = self._trainer.config.train, self._trainer.mesh
        dp, cp, tp = mesh["dp"], mesh["cp"], mesh["tp"]
        first = train.global_batch // dp.size * dp.index + self._microbatch * train.microbatch
        known = self.current.outputs.setdefault(path, [])
        if any(one.first == first for one in known):
            return  # a module that is used twice: the first use counts
        held = positions(train.sequence, cp.index, cp.size).numpy()
        known.append(Output(_copy(out), first, held, (tp.index, tp.size)))

    def step(self, number: int) -> AbstractContextManager[None]:
        """A new one begins."""
        self.current = Step()
        return self._then.step(number) if self._then else nullcontext()

    @contextmanager
    def phase(self, name: str, microbatch: int | None, stage: int | None) -> Iterator[None]:
        """In a forward, outputs are of this microbatch; the optimizer's first act is to clip."""
        if name == "optimizer":
            self.current.gradients = gradients(self._trainer)
        self._microbatch = microbatch if name == "forward" else None
        with self._then.phase(name, microbatch, stage) if self._then else nullcontext():
            yield
        self._microbatch = None

    def numbers(self, values: Mapping[str, float]) -> None:
        """For the other listener."""
        if self._then:
            self._then.numbers(values)

    def expert_load(self, layer: int, shares: Sequence[float], dropped: float) -> None:
        """For the other listener."""
        if self._then:
            self._then.expert_load(layer, shares, dropped)

    def group(self, name: str, axis: str) -> None:
        """For the other listener."""
        if self._then:
            self._then.group(name, axis)

    def mesh(self, coordinates: Mapping[str, int], order: tuple[str, ...]) -> None:
        """For the other listener."""
        if self._then:
            self._then.mesh(coordinates, order)


def _modules(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """Every module that this rank holds, by its path in the whole model."""
    for parts in trainer.built.pipeline.stages.values():
        for part in parts:
            for name, module in part.module.named_modules():
                yield ".".join(filter(None, (part.path, name))), module


def gradients(trainer: Trainer) -> dict[str, Fragment]:
    """Of what this rank updates, as they are now."""
    built = trainer.built
    return {
        path: fragment(piece.grad, built.places[path])
        for path, piece in built.pieces.items()
        if piece.grad is not None
    }


def weights(trainer: Trainer) -> dict[str, Fragment]:
    """What this rank computes with; under ZeRO 3 its share of it."""
    built = trainer.built
    if trainer.config.parallel.zero == 3:
        return {path: fragment(p, built.places[path]) for path, p in built.pieces.items()}
    return {path: fragment(p, built.shards[path]) for path, p in built.parameters.items()}


def fragment(values: Tensor, place: Place) -> Fragment:
    """A copy of what this rank holds, and where it belongs."""
    return Fragment(_copy(values).reshape(-1), place)


def _copy(values: Tensor) -> Any:
    """As float64 in memory of its own."""
    return values.detach().double().cpu().numpy().copy()
