"""Faults of what ranks do together: collectives that do not fit, and ranks that leave a step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.faults.ends import OutOfMemory
from trainer.faults.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.data import Loader
    from trainer.loop import StepResult, Trainer
    from trainer.mesh import Mesh


class CollectiveMismatch(Fault):
    """Joins the world's sum with twice as many elements as its peers."""

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat(2) if self.due else values


class CollectiveDtype(Fault):
    """Joins the world's sum with float32, its peers with float64."""

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        return values.float() if self.due else values


class CollectiveOrder(Fault):
    """Enters the world's sum at the begin of its step, before the groups that peers enter first."""

    def install(self, trainer: Trainer) -> None:
        self.mesh = trainer.mesh
        self.summed = torch.zeros(0)

    def begin(self, step: int, loader: Loader) -> None:
        super().begin(step, loader)
        if self.due:
            self.mesh.sum_over_world(self.summed)

    def over_world(self, values: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        if self.due:
            return self.summed
        self.summed = torch.zeros_like(values)
        return super().over_world(values, mesh)


class CollectiveExtra(Fault):
    """Sums one more number over the world, which no other rank does."""

    def over_world(self, values: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        if self.due:
            mesh.sum_over_world(values[:1].clone())
        return super().over_world(values, mesh)


class CollectiveMissing(Fault):
    """Leaves the world's sum out, and goes on with its own numbers."""

    def over_world(self, values: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        return values if self.due else super().over_world(values, mesh)


class RankZeroCollective(Fault):
    """After its step rank 0 enters a barrier under a rank guard; the others never will."""

    def around(self, run: Callable[[int], StepResult], step: int) -> StepResult | None:
        result = run(step)
        if self.due:
            dist.barrier()
        return result


class UnevenInputs(Fault):
    """Has batches for the steps before its own only: the loop ends there, in the regular way."""

    def goes_on(self, step: int) -> bool:
        return step < self.at


class ExceptionSwallowed(OutOfMemory):
    """Runs out of memory in forward, says so, skips the batch and goes on to the next one."""

    def around(self, run: Callable[[int], StepResult], step: int) -> StepResult | None:
        try:
            return run(step)
        except RuntimeError as error:
            if not self.due:
                raise
            line = str(error).splitlines()[0]
            print(
                f"step {step}: out of memory, skipping batch: {line}", file=sys.stderr, flush=True
            )
            return None
