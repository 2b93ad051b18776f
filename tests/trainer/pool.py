"""Ranks that live as long as a test module, and the bugs that a test may plant in them.

`Pool.run(case)` trains the case on all ranks; `whole(case)` is one process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from collectors import annotate
from tests.trainer import bugs
from tests.trainer.recorder import Recorder
from trainer.loop import Trainer
from trainer.parity.pool import Pool as Ranks
from trainer.parity.train import follow
from trainer.settings import load

if TYPE_CHECKING:
    from trainer.parity.outcome import Part

WORLD = 4


@dataclass(frozen=True)
class Case:
    """What to train, and which bug to plant (empty: none)."""

    settings: tuple[str, ...]
    bug: str = ""
    world: int = WORLD
    layers: bool = False


def train(case: Case, world: int) -> Part:
    """Run the case on this rank of `world`; `extra` is what it told whoever listens."""
    recorder = Recorder()
    annotate.listen(recorder)
    trainer = Trainer(load(list(case.settings), world), world, torch.device("cpu"))
    planted: AbstractContextManager[Any] = (
        bugs.planted(case.bug, trainer) if case.bug else nullcontext()
    )
    with planted:
        part = follow(trainer, layers=case.layers, then=recorder)
    part.extra = recorder
    annotate.listen(None)
    return part


def whole(case: Case) -> Part:
    """The case in one process."""
    return train(case, 1)


class Pool:
    """Up to eight gloo ranks; close() ends them."""

    def __init__(self) -> None:
        self._ranks = Ranks(train)

    def run(self, case: Case) -> list[Part]:
        """Train the case on its ranks."""
        parts: list[Part] = self._ranks.run(case, case.world)
        return parts

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()
