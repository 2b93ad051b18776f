"""The loss on samples that training never sees: forward only, the same number on every layout.

In: a Trainer between two steps. Out: nats a token over the first eval.batches global batches of
held-out samples, always the same ones; which samples are held out depends on their number alone.
It changes nothing of the training that goes on: no gradient, no moment, no order of samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collectors import annotate
from trainer.model import IGNORE

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.loop import Trainer


def is_due(step: int, config: Config) -> bool:
    """Whether an evaluation follows the update of `step`."""
    every = config.eval.every
    return every > 0 and ((step + 1) % every == 0 or step == config.train.steps - 1)


def evaluate(trainer: Trainer) -> float:
    """The mean loss, in nats a token; every rank calls it and has the answer."""
    mesh, pipeline = trainer.mesh, trainer.built.pipeline
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    for number in range(trainer.config.eval.batches):
        batches = trainer.held(number)
        sums[0] += pipeline.evaluate(batches)
        sums[1] += torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum()
    if mesh["tp"].index:
        sums.zero_()  # the ranks of a tp group know the same loss
    if mesh["pp"].index:
        sums[1] = 0  # and those of a pp group have read the same tokens
    with annotate.phase("communication"):
        mesh.sum_over_world(sums)
    return (sums[0] / sums[1]).item()
