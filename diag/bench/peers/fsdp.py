"""torch's FSDP2: `fully_shard` on every layer and on the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diag.bench.peers.script import Script, mean_loss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config import Config
    from trainer.data import Microbatch


class Peer(Script):
    """Parameters are shares that are gathered for each layer, forward and backward."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, dp=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        self.sharded = self.model()
        for layer in self.sharded.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.sharded, mesh=mesh)
        self.optimize(dict(self.sharded.named_parameters()))

    def run(self, batches: list[Microbatch]) -> Tensor:
        """As Script.run."""
        total = torch.zeros(())
        for batch in batches:
            loss = mean_loss(self.sharded(batch.inputs), batch.targets) / len(batches)
            torch.autograd.backward(loss)
            total += loss.detach()
        return total
