"""A few steps of a rank with a fault and of its peers, and what they came to."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from trainer.loop import Trainer
from trainer.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.loop import StepResult


@dataclass(frozen=True)
class Faulty:
    """What to train."""

    settings: tuple[str, ...]
    silent: int = 1 << 30
    """Step from which on sums and barriers are noted and not run: gloo ends a process whose peer
    brings another size, and others would wait for minutes."""


@dataclass
class Seen:
    """What a rank did."""

    results: list[StepResult] = field(default_factory=list)
    calls: list[list[tuple[str, int, str]]] = field(default_factory=list)
    """Of each step begun, its sums and barriers: name, elements, dtype."""
    own_losses: list[float] = field(default_factory=list)
    """Of each step, before any sum over ranks."""
    struck: bool = False
    """Whether the fault is on this rank."""
    weights: float = 0.0
    """Sum of the squares of what it holds, at the end."""


def train(case: Faulty, world: int) -> Seen:
    """Run the loop as the program does, on this rank of `world`."""
    config = load(list(case.settings), world)
    trainer = Trainer(config, world, torch.device("cpu"))
    fault, seen = trainer.built.fault, Seen()
    seen.struck = type(fault).__module__ != "trainer.faults.fault"
    with ExitStack() as heard:
        for name in ("all_reduce", "barrier"):
            heard.enter_context(
                mock.patch.object(dist, name, _noted(name, seen.calls, case.silent))
            )
        heard.enter_context(mock.patch.object(trainer.built.pipeline, "run", _own(trainer, seen)))
        for number in range(config.train.steps):
            if not fault.goes_on(number):
                break
            seen.calls.append([])
            result = fault.around(trainer.step, number)
            if result is not None:
                seen.results.append(result)
    seen.weights = sum(
        p.detach().double().square().sum().item() for p in trainer.built.pieces.values()
    )
    return seen


def _noted(name: str, calls: list[list[tuple[str, int, str]]], silent: int) -> Callable[..., Any]:
    real = getattr(dist, name)

    def call(*given: Any, **named: Any) -> Any:
        tensor = given[0] if given else torch.empty(0)
        calls[-1].append((name, tensor.numel(), str(tensor.dtype)))
        return real(*given, **named) if len(calls) <= silent else mock.Mock()

    return call


def _own(trainer: Trainer, seen: Seen) -> Callable[..., Any]:
    real = trainer.built.pipeline.run

    def run(*given: Any) -> torch.Tensor:
        own: torch.Tensor = real(*given)
        seen.own_losses.append(own.item())
        return own

    return run
