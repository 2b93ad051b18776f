"""One rank's share of a parity run: a few real steps of the real trainer, and what they came to.

In: settings and the world's size; the default process group stands where the world is not 1.
Out: a `Part`. Nothing is gathered: each rank brings what it holds and says of what it is a part.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from trainer.blueprint import blamed
from trainer.loop import Trainer
from trainer.parity import listen
from trainer.parity.cases import STEPS
from trainer.parity.outcome import Part
from trainer.settings import load

if TYPE_CHECKING:
    from collectors import annotate
    from trainer.parity.cases import Case


def train(case: Case, world: int) -> Part:
    """Run STEPS optimizer steps with these settings on this rank of `world`."""
    config = load(list(case.settings), world)
    with blamed(config.model.file) if config.model.file else nullcontext():
        return follow(Trainer(config, world, torch.device("cpu")), layers=case.layers)


def follow(
    trainer: Trainer, *, layers: bool = False, then: annotate.Listener | None = None
) -> Part:
    """Run STEPS steps of a trainer and note what they came to; `then` hears what they tell."""
    shapes = {path: tuple(shape) for path, shape in trainer.built.shapes.items()}
    part = Part(shapes=shapes, start=listen.weights(trainer))
    with listen.Watch(trainer, layers=layers, then=then) as watch:
        for number in range(STEPS):
            result = trainer.step(number)
            step = watch.current
            step.loss, step.norm, step.tokens = result.loss, result.grad_norm, result.tokens
            step.evaluation = result.evaluation
            step.clipped = listen.gradients(trainer)
            step.weights = listen.weights(trainer)
            part.steps.append(step)
    return part
