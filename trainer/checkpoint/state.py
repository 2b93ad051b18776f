"""What of a trainer a checkpoint holds, and how it gets back into one.

In: a Trainer. Out: `Entry`s, which are views: written from them, and read into them.

    model.PATH                 a parameter
    optimizer.exp_avg.PATH     its moments; optimizer.exp_avg_sq.PATH
    optimizer.step.PATH        how often it was updated

Beside the tensors a run has its step and its loss scale (snapshot.py). Nothing else changes: which
samples come next, the learning rate and every choice by chance are functions of the step's number
and the seed; there is no generator to keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer import optim
from trainer.checkpoint.plans import Entry
from trainer.place import Place

if TYPE_CHECKING:
    from trainer.loop import Trainer

_SCALAR = Place.of_all(())


def entries(trainer: Trainer) -> list[Entry]:
    """All that this rank holds; always the same keys, also before the first step."""
    optim.have_moments(trainer.optimizer)
    found = []
    for path, piece in trainer.built.pieces.items():
        place = trainer.built.places[path]
        found.append(Entry(f"model.{path}", place, piece.detach().view(-1)))
        for name, value in trainer.optimizer.state[piece].items():
            where = place if value.dim() else _SCALAR
            found.append(Entry(f"optimizer.{name}.{path}", where, value.detach().view(-1)))
    return found
