"""What the plain scripts share: model, start, data and optimizer of the trainer, and a step.

In: a Config. Out: `Script`, whose `step` a peer fills with its own forward and backward. A script
is what one writes without a trainer: the mean over the rank's own tokens, clipping, AdamW, and the
loss read once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

from trainer import optim
from trainer.corpus import open_corpus
from trainer.data import Loader
from trainer.model import IGNORE, Transformer, initial_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config import Config
    from trainer.data import Microbatch


class Script:
    """One rank of a plain script; `dp` ranks read different samples."""

    def __init__(self, config: Config, dp: int) -> None:
        self.config = config
        self.dp = dp
        train = config.train
        self.loader = Loader(
            open_corpus(config.data, train.sequence + 1),
            sequence=train.sequence,
            global_batch=train.global_batch,
            microbatch=train.microbatch,
            seed=train.seed,
        )
        self.optimizer: torch.optim.Optimizer

    def model(self) -> Transformer:
        """The whole model, with the trainer's start."""
        model = Transformer(self.config.model)
        with torch.no_grad():
            for path, p in model.named_parameters():
                layers, seed = self.config.model.layers, self.config.train.seed
                p.copy_(initial_value(path, p.shape, layers, seed))
        return model

    def optimize(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Update these from now on."""
        shapes = {path: p.shape for path, p in parameters.items()}
        self.optimizer = optim.adamw(parameters, self.config.optim, shapes)

    def step(self, number: int) -> float | None:
        """One optimizer step; the mean loss of this rank's tokens, None on ranks without a loss."""
        rank = dist.get_rank() if self.dp > 1 else 0
        batches = self.loader.load(number, rank, self.dp)
        self.optimizer.zero_grad()
        loss = self.run(batches)
        self.clip([p for group in self.optimizer.param_groups for p in group["params"]])
        self.optimizer.step()
        return None if loss is None else loss.item()

    def run(self, batches: list[Microbatch]) -> Tensor | None:
        """Forward and backward of a step; the mean loss where this rank has it."""
        raise NotImplementedError

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """By the global norm."""
        nn.utils.clip_grad_norm_(parameters, self.config.optim.clip)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy a token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
