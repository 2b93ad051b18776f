"""One rank's share of a parity run: a few real steps of the real trainer, and what they came to.

In: settings and the world's size; the default process group stands where the world is not 1.
Out: a `Part`. Nothing is gathered: each rank brings what it holds and says of what it is a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer.loop import Trainer
from trainer.parity.outcome import Fragment, Part
from trainer.parity.work import STEPS
from trainer.settings import load

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.place import Place


def train(settings: tuple[str, ...], world: int) -> Part:
    """Run STEPS optimizer steps with these settings on this rank of `world`."""
    return follow(Trainer(load(list(settings), world), world, torch.device("cpu")))


def follow(trainer: Trainer) -> Part:
    """Run STEPS steps of a trainer and note what they came to."""
    built = trainer.built
    part = Part(shapes={path: tuple(shape) for path, shape in built.shapes.items()})
    for number in range(STEPS):
        result = trainer.step(number)
        part.losses.append(result.loss)
        part.norms.append(result.grad_norm)
        part.tokens.append(result.tokens)
        if result.evaluation is not None:
            part.evaluations.append(result.evaluation)
        part.gradients.append(
            {
                path: fragment(piece.grad, built.places[path])
                for path, piece in built.pieces.items()
                if piece.grad is not None
            }
        )
    if trainer.config.parallel.zero == 3:
        part.weights = {path: fragment(p, built.places[path]) for path, p in built.pieces.items()}
    else:  # under zero 1 and 2 each rank has its whole shard again
        part.weights = {
            path: fragment(p, built.shards[path]) for path, p in built.parameters.items()
        }
    return part


def fragment(values: Tensor, place: Place) -> Fragment:
    """A copy of what this rank holds, and where it belongs."""
    return Fragment(values.detach().flatten().numpy().copy(), place)
