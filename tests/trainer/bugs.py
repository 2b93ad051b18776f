"""Bugs that parallel trainers really have had, planted on demand into ours.

A test plants each and asks whether the comparison with one process notices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import torch

from trainer import optim
from trainer.model import IGNORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from trainer.data import Microbatch
    from trainer.documents import Documents, Tile
    from trainer.loop import Trainer
    from trainer.mesh import Axis


def planted(name: str, trainer: Trainer) -> AbstractContextManager[object]:
    """The bug, for as long as the context is open."""
    plant = {
        "summed instead of averaged": _loss_by_local_tokens(1),
        "loss by local tokens": _loss_by_local_tokens(trainer.mesh["dp"].size),
        "clip by the local norm": _local_norm,
        "norm counts replicas": _norm_counts_replicas,
        "accumulation scaled twice": _scaled_twice,
        "no sum at the entry": _no_entry_sum,
        "no sum of norm weights": _no_norm_sum,
        "ring gradient stays": _ring_gradient_stays,
        "documents end at the rank": _documents_end_at_the_rank,
    }[name]
    return plant(trainer)


def _loss_by_local_tokens(divisor: int) -> Callable[[Trainer], AbstractContextManager[object]]:
    """Each replica divides by its own tokens; then dp sums (divisor 1) or averages."""

    def plant(trainer: Trainer) -> AbstractContextManager[object]:
        def count(batches: list[Microbatch]) -> torch.Tensor:
            valid = torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum()
            return torch.stack((valid.double() * divisor, valid.double()))

        return mock.patch.object(trainer, "_count", count)

    return plant


def _local_norm(trainer: Trainer) -> AbstractContextManager[object]:
    """Each rank clips by the norm of what it holds; the norm that is shown stays true."""
    real = optim.clip

    def clip(parameters: Mapping[str, nn.Parameter], norm: Tensor, limit: float) -> None:
        own = torch.stack([p.grad.square().sum() for p in parameters.values()]).sum().sqrt()
        real(parameters, own, limit)

    return mock.patch.object(optim, "clip", clip)


def _norm_counts_replicas(trainer: Trainer) -> AbstractContextManager[object]:
    """Replicated parameters are counted once a rank instead of once."""
    return mock.patch.object(type(trainer.mesh), "owns", lambda _mesh, _sharded: True)


def _scaled_twice(trainer: Trainer) -> AbstractContextManager[object]:
    """Gradients are divided by the number of microbatches although the loss already was."""
    buckets = trainer.built.buckets
    real = buckets.finish

    def finish() -> None:
        real()
        for bucket in buckets.buckets:
            bucket.flat.div_(buckets.passes)

    return mock.patch.object(buckets, "finish", finish)


def _ring_gradient_stays(trainer: Trainer) -> AbstractContextManager[object]:
    """Each rank keeps the key and value gradients that it last held, instead of its own."""
    from trainer.parallel import context

    def stay(way: context._Way, own: torch.Tensor) -> torch.Tensor:
        context._arrived(way)
        return own

    return mock.patch.object(context, "bring_home", stay)


def _documents_end_at_the_rank(trainer: Trainer) -> AbstractContextManager[object]:
    """Keys that come from other ranks are masked by causality alone."""
    from trainer.parallel import context

    real = context._tiles

    def tiles(turn: int, query: Tensor, documents: Documents | None, axis: Axis) -> Iterator[Tile]:
        return real(turn, query, documents if turn == 0 else None, axis)

    return mock.patch.object(context, "_tiles", tiles)


def _no_norm_sum(trainer: Trainer) -> AbstractContextManager[object]:
    """Sequence parallelism without the sum of the norm weights' gradients over tp."""
    return mock.patch.object(trainer.built.partial, "finish", lambda: None)


def _no_entry_sum(trainer: Trainer) -> AbstractContextManager[object]:
    """The backward sum before the column-parallel layers is missing."""
    from trainer.parallel import tensor

    return mock.patch.object(
        tensor._CopyIn, "backward", staticmethod(lambda _ctx, grad: (grad, None))
    )
