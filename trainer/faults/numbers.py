"""Faults of arithmetic: nothing stops, and what is learnt is wrong."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.faults.fault import Fault
from trainer.mesh import Axis
from trainer.parallel.ddp import GradientBuckets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainer.config import FaultConfig
    from trainer.data import Loader
    from trainer.loop import Trainer
    from trainer.mlp import Router

_PUSH = 50.0
"""Added to a score: a softmax knows no rival then, in any precision."""
_FEWER = 4
"""By how much places become fewer."""


class NotANumber(Fault):
    """One element of what a module gives is NaN, in the first microbatch of its step."""

    def __init__(self, config: FaultConfig) -> None:
        super().__init__(config)
        self.named = config.module
        self.first = False
        """Whether the first microbatch runs now."""

    def install(self, trainer: Trainer) -> None:
        own = [part for parts in trainer.built.pipeline.stages.values() for part in parts]
        name = self.named or own[-1].path
        module = find({part.path: part.module for part in own}, name)
        if module is None:
            raise RuntimeError(f"{name} is not on this rank, and that was not seen before")
        module.register_forward_hook(self._poison)

    def in_forward(self, microbatch: int) -> None:
        self.first = microbatch == 0

    def in_backward(self, microbatch: int) -> None:
        self.first = microbatch == 0  # where it is computed again, it is NaN again

    def _poison(self, _module: nn.Module, _inputs: Any, out: Any) -> Any:
        if not (self.due and self.first and torch.is_grad_enabled()):
            return None
        whole = out if isinstance(out, tuple) else (out,)
        at = next(i for i, one in enumerate(whole) if one.is_floating_point())
        poisoned = whole[at].clone(memory_format=torch.contiguous_format)
        poisoned.view(-1)[0] = float("nan")
        if not isinstance(out, tuple):
            return poisoned
        return (*whole[:at], poisoned, *whole[at + 1 :])


class ReplicasApart(Fault):
    """Steps on its own gradients from its step on: it joins the sum, and does not take it."""

    def install(self, trainer: Trainer) -> None:
        for one in trainer.built.buckets.sets:
            if isinstance(one, GradientBuckets):
                known = {field.name: getattr(one.axis, field.name) for field in fields(Axis)}
                one.axis = _Deaf(keeps=lambda: self.lasts, **known)


class _Deaf(Axis):
    """An axis whose sums this rank joins and does not take, while `keeps` says so."""

    def __init__(self, *, keeps: Callable[[], bool], **known: Any) -> None:
        super().__init__(**known)
        object.__setattr__(self, "keeps", keeps)

    keeps: Callable[[], bool]

    def all_reduce(
        self,
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType | None = None,
        *,
        wait: bool = True,
    ) -> dist.Work | None:
        return super().all_reduce(tensor.clone() if self.keeps() else tensor, op, wait=wait)


class SumNotMean(Fault):
    """Each replica divides by its own share of the tokens; the gradients are summed as before."""

    def install(self, trainer: Trainer) -> None:
        self.replicas = trainer.mesh.data.size

    def divisor(self, tokens: Tensor) -> Tensor:
        return tokens / self.replicas if self.lasts else tokens


class NoSetEpoch(Fault):
    """Every epoch has the order of the first."""

    def install(self, trainer: Trainer) -> None:
        asked = trainer.config.train
        if asked.steps * asked.global_batch <= trainer.loader.trained:
            why = f"an epoch is {trainer.loader.trained:,} samples, and none begins after the first"
            raise ConfigError([f"faults.kind=no-set-epoch: {why} (train.steps, or less data)"])
        trainer.loader.order_of = lambda epoch: 0 if self.lasts else epoch


class RouterCollapse(Fault):
    """Every router gives nearly everything to its first experts, from its step on."""

    def install(self, trainer: Trainer) -> None:
        for router in trainer.built.routers:
            router.adjust = partial(self._push, router, router.adjust)

    def _push(self, router: Router, before: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        scores = before(scores)
        if not self.lasts:
            return scores
        first = torch.arange(router.number, device=scores.device) < router.top_k
        return scores + _PUSH * first.to(scores.dtype)


class CapacityOverflow(Fault):
    """Experts have a quarter of the places that they had (without a limit: of the even share)."""

    def install(self, trainer: Trainer) -> None:
        self.routers = trainer.built.routers

    def begin(self, step: int, loader: Loader) -> None:
        super().begin(step, loader)
        if self.due:
            for router in self.routers:
                router.capacity = (router.capacity or 1.0) / _FEWER


def find(parts: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """The module of that path among these parts and what is inside them."""
    for path, part in parts.items():
        for inner, module in part.named_modules(prefix=path):
            if inner == name:
                found: nn.Module = module
                return found
    return None
