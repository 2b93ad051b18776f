"""torch's DTensor tensor parallelism: `parallelize_module` with column and row plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from diag.bench.peers.script import Script, mean_loss

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Microbatch


class Peer(Script):
    """Heads, MLP, embedding, head and loss are split, as the trainer's plan has them."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, dp=1)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.split = self.model()
        whole = (Replicate(),)
        entry = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        beside = (Replicate(), None)  # documents, of which there are none here
        attention = PrepareModuleInput(input_layouts=beside, desired_input_layouts=beside)
        for layer in self.split.layers.values():
            parallelize_module(
                layer,
                mesh,
                {
                    "attention": attention,
                    "attention.query": ColwiseParallel(),
                    "attention.key": ColwiseParallel(),
                    "attention.value": ColwiseParallel(),
                    "attention.out": RowwiseParallel(),
                    "mlp": entry,
                    "mlp.gate": ColwiseParallel(),
                    "mlp.up": ColwiseParallel(),
                    "mlp.down": RowwiseParallel(),
                },
            )
        parallelize_module(
            self.split,
            mesh,
            {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            },
        )
        self.optimize(dict(self.split.named_parameters()))

    def run(self, batches: list[Microbatch]) -> Tensor:
        """As Script.run."""
        total = torch.zeros(())
        for batch in batches:
            with loss_parallel():
                loss = mean_loss(self.split(batch.inputs), batch.targets) / len(batches)
                torch.autograd.backward(loss)
            value = loss.detach()
            total += value.full_tensor() if isinstance(value, DTensor) else value
        return total

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """Split and whole gradients do not go into one norm: each kind has its own."""
        kinds = [
            [p for p in parameters if isinstance(p, DTensor) == split] for split in (True, False)
        ]
        norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])
                 for kind in kinds]  # fmt: skip
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        norm = torch.linalg.vector_norm(torch.stack(whole))
        for kind in kinds:
            nn.utils.clip_grads_with_norm_(kind, self.config.optim.clip, norm)
