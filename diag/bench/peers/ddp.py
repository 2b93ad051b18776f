"""torch's DistributedDataParallel, with its own defaults."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from diag.bench.peers.script import Script, mean_loss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import Config
    from trainer.data import Microbatch


class Peer(Script):
    """Gradients accumulate over microbatches; the last backward sums them over ranks."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, dp=2)
        model = self.model()
        self.optimize(dict(model.named_parameters()))
        self.wrapped = DistributedDataParallel(model)

    def run(self, batches: list[Microbatch]) -> Tensor:
        """As Script.run."""
        total = torch.zeros(())
        for batch in batches:
            last = batch is batches[-1]
            with nullcontext() if last else self.wrapped.no_sync():
                loss = mean_loss(self.wrapped(batch.inputs), batch.targets) / len(batches)
                torch.autograd.backward(loss)
            total += loss.detach()
        return total
