"""torch's pipelining: a PipelineStage a rank, run by Schedule1F1B or ScheduleGPipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from diag.bench.peers.script import Script, mean_loss

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Microbatch

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Peer(Script):
    """The first half of the layers on rank 0, the other on rank 1, as the trainer has them."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, dp=1)
        parts = self.model().chain()
        rank = dist.get_rank()
        cut = 1 + config.model.layers // 2  # the embedding goes with the first half
        own = parts[:cut] if rank == 0 else parts[cut:]
        module = nn.Sequential(*(part for _, part in own))
        self.optimize({f"{at}.{n}": p for at, one in own for n, p in one.named_parameters()})
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        count = config.train.global_batch // config.train.microbatch
        self.schedule = _SCHEDULES[config.parallel.schedule](stage, count, loss_fn=mean_loss)
        self.last = rank == 1

    def run(self, batches: list[Microbatch]) -> Tensor | None:
        """As Script.run."""
        if not self.last:
            self.schedule.step(torch.cat([one.inputs for one in batches]))
            return None
        losses: list[Tensor] = []
        self.schedule.step(target=torch.cat([one.targets for one in batches]), losses=losses)
        return torch.stack(losses).mean()

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """The norm is over both ranks."""
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = norm.square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, self.config.optim.clip, square.sqrt())
