"""Bugs that parallel trainers really have had, planted on demand into ours.

A test plants each and asks whether the comparison with one process notices, and names the place.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch.nn import functional as F  # noqa: N812

from tests.trainer.expert_bugs import EXPERT_PLANTS
from trainer import optim
from trainer.model import IGNORE, rotary_table
from trainer.parallel import context, tensor
from trainer.scale import LossScale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from trainer.data import Microbatch
    from trainer.documents import Documents, Tile
    from trainer.loop import Trainer
    from trainer.mesh import Axis
    from trainer.parallel.zero import Unit

    Plant = Callable[[Trainer], AbstractContextManager[object]]


def planted(name: str, trainer: Trainer) -> AbstractContextManager[object]:
    """The bug, for as long as the context is open."""
    return (_PLANTS | EXPERT_PLANTS)[name](trainer)


def _summed_not_averaged(trainer: Trainer) -> AbstractContextManager[object]:
    """Each replica takes the mean over its own tokens; their gradients are summed, not averaged."""
    return _gradients_times(trainer, trainer.mesh["dp"].size)


def _scaled_twice(trainer: Trainer) -> AbstractContextManager[object]:
    """Gradients are divided by the number of microbatches although the loss already was."""
    return _gradients_times(trainer, 1 / trainer.built.buckets.passes)


def _gradients_times(trainer: Trainer, factor: float) -> AbstractContextManager[object]:
    buckets = trainer.built.buckets
    real = buckets.finish

    def finish() -> None:
        real()
        for piece in trainer.built.pieces.values():
            piece.grad.mul_(factor)

    return mock.patch.object(buckets, "finish", finish)


def _loss_by_local_tokens(trainer: Trainer) -> AbstractContextManager[object]:
    """Each replica divides by its own tokens, and dp averages: right where all have as many."""

    def count(batches: list[Microbatch]) -> torch.Tensor:
        valid = torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum()
        return torch.stack((valid.double() * trainer.mesh["dp"].size, valid.double()))

    return mock.patch.object(trainer, "_count", count)


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


def _no_sum_over_cp(trainer: Trainer) -> AbstractContextManager[object]:
    """Gradients are summed over dp only, though cp ranks saw other tokens."""
    (own,) = trainer.built.buckets.sets
    return mock.patch.object(own, "axis", trainer.mesh["dp"])


def _ring_gradient_stays(trainer: Trainer) -> AbstractContextManager[object]:
    """Each rank keeps the key and value gradients that it last held, instead of its own."""

    def stay(way: context._Way, own: torch.Tensor) -> torch.Tensor:
        context._arrived(way)
        return own

    return mock.patch.object(context, "bring_home", stay)


def _documents_end_at_the_rank(trainer: Trainer) -> AbstractContextManager[object]:
    """Keys that come from other ranks are masked by causality alone."""
    real = context._tiles

    def tiles(turn: int, query: Tensor, documents: Documents | None, axis: Axis) -> Iterator[Tile]:
        return real(turn, query, documents if turn == 0 else None, axis)

    return mock.patch.object(context, "_tiles", tiles)


def _local_positions(trainer: Trainer) -> AbstractContextManager[object]:
    """Rotary angles of positions 0, 1, ... on every cp rank, whatever it holds."""

    def table(
        module: context.ContextParallelAttention,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        return rotary_table(length, module.head, module.rope_base, dtype, device)

    return mock.patch.object(context.ContextParallelAttention, "table", table)


def _scaled(trainer: Trainer) -> AbstractContextManager[object]:
    """No bug: a loss scale where float64 has none, so that its arithmetic is proved exactly."""
    trainer.scale = LossScale(trainer.config.scale, on=True)
    return nullcontext()


def _clip_before_unscale(trainer: Trainer) -> AbstractContextManager[object]:
    """Norm and clipping see gradients that still carry the scale, which comes out afterwards."""
    _scaled(trainer)
    real = optim.clip

    def clip(parameters: Mapping[str, nn.Parameter], norm: Tensor, limit: float) -> None:
        real(parameters, norm, limit)
        for p in parameters.values():
            p.grad.div_(trainer.scale.value)

    planted = ExitStack()
    planted.enter_context(mock.patch.object(trainer.scale, "unscale", lambda _pieces: None))
    planted.enter_context(mock.patch.object(optim, "clip", clip))
    return planted


def _overflow_on_one_rank(trainer: Trainer) -> AbstractContextManager[object]:
    """In step 1 one element on the last rank is infinite, after all sums: no other rank has it.

    It is a norm weight's, which that rank holds as a copy of others' and does not count.
    """
    _scaled(trainer)
    real = trainer.built.partial.finish

    def finish() -> None:
        real()
        if trainer.built.fault.step == 1 and trainer.mesh.rank == trainer.mesh.world - 1:
            path = next(path for path in reversed(trainer.built.pieces) if "norm" in path)
            trainer.built.pieces[path].grad[-1] = float("inf")

    return mock.patch.object(trainer.built.partial, "finish", finish)


def _no_norm_sum(trainer: Trainer) -> AbstractContextManager[object]:
    """Sequence parallelism without the sum of the norm weights' gradients over tp."""
    return mock.patch.object(trainer.built.partial, "finish", lambda: None)


def _no_entry_sum(trainer: Trainer) -> AbstractContextManager[object]:
    """The backward sum before the column-parallel layers is missing."""
    return mock.patch.object(
        tensor._CopyIn, "backward", staticmethod(lambda _ctx, grad: (grad, None))
    )


def _bias_on_every_rank(trainer: Trainer) -> AbstractContextManager[object]:
    """A row-parallel layer adds its bias before the sum, and so once a rank."""

    def forward(module: tensor.RowParallelLinear, x: Tensor) -> Tensor:
        return module.doors.leave(F.linear(x, module.weight, module.bias))

    return mock.patch.object(tensor.RowParallelLinear, "forward", forward)


def _tied_gradient_once(trainer: Trainer) -> AbstractContextManager[object]:
    """Embedding and head share a matrix, and only the head's gradient reaches it."""
    real = F.embedding

    def embedding(ids: Tensor, weight: Tensor) -> Tensor:
        return real(ids, weight.detach())

    return mock.patch.object(tensor.F, "embedding", embedding)


def _last_stage_scales_again(trainer: Trainer) -> AbstractContextManager[object]:
    """The last stage divides its loss by the microbatches, as well as by the tokens."""
    pipeline = trainer.built.pipeline
    real = pipeline.loss.forward

    def forward(*given: Tensor) -> Tensor:
        summed = real(*given)
        return summed.detach() + (summed - summed.detach()) / trainer.built.buckets.passes

    return mock.patch.object(pipeline.loss, "forward", forward)


def _stale_weights(trainer: Trainer) -> AbstractContextManager[object]:
    """ZeRO 3 gathers what the shares were at the start, not what they became."""
    stack = ExitStack()
    for unit in trainer.built.buckets.buckets:
        stack.enter_context(mock.patch.object(unit, "fetch", _fetch_of_old(unit)))
    return stack


def _fetch_of_old(unit: Unit) -> Callable[[], None]:
    real, old = unit.fetch, unit.own.clone()

    def fetch() -> None:
        own, unit.own = unit.own, old
        real()
        unit.own = own

    return fetch


def _never_gathered(trainer: Trainer) -> AbstractContextManager[object]:
    """ZeRO 1 updates each rank's share and does not tell the others."""
    return mock.patch.object(trainer.built.buckets, "updated", lambda: None)


def _dropout_equal_over_tp(trainer: Trainer) -> AbstractContextManager[object]:
    """Each rank drops its shard of the sequence as if it were the first: one seed, equal masks."""
    passing = trainer.built.passing
    first = passing.positions - passing.positions.min()
    return mock.patch.object(passing, "positions", first)


def _dropout_apart_over_tp(trainer: Trainer) -> AbstractContextManager[object]:
    """Each rank draws for itself what falls of a stream that all of them hold."""
    passing = trainer.built.passing
    return mock.patch.object(passing, "seed", passing.seed + trainer.mesh["tp"].index)


def _dropout_equal_over_dp(trainer: Trainer) -> AbstractContextManager[object]:
    """Every replica counts its samples from 0."""
    return mock.patch.object(trainer.built.passing, "first", 0)


def _dropout_anew_in_backward(trainer: Trainer) -> AbstractContextManager[object]:
    """What is computed again is dropped anew, as from a generator whose state was not kept."""
    passing, real = trainer.built.passing, trainer.built.pipeline._backward

    def backward(*arguments: object) -> None:
        passing.step += 1000
        real(*arguments)
        passing.step -= 1000

    return mock.patch.object(trainer.built.pipeline, "_backward", backward)


_PLANTS: dict[str, Plant] = {
    "summed instead of averaged": _summed_not_averaged,
    "loss by local tokens": _loss_by_local_tokens,
    "clip by the local norm": _local_norm,
    "norm counts replicas": _norm_counts_replicas,
    "accumulation scaled twice": _scaled_twice,
    "no sum at the entry": _no_entry_sum,
    "no sum of norm weights": _no_norm_sum,
    "no sum over cp": _no_sum_over_cp,
    "ring gradient stays": _ring_gradient_stays,
    "documents end at the rank": _documents_end_at_the_rank,
    "positions of the own rank": _local_positions,
    "bias added on every rank": _bias_on_every_rank,
    "tied gradient of one use": _tied_gradient_once,
    "last stage scales again": _last_stage_scales_again,
    "stale weights": _stale_weights,
    "shares not gathered": _never_gathered,
    "scaled": _scaled,
    "clip before unscale": _clip_before_unscale,
    "overflow on one rank": _overflow_on_one_rank,
    "dropout equal over tp": _dropout_equal_over_tp,
    "dropout apart over tp": _dropout_apart_over_tp,
    "dropout equal over dp": _dropout_equal_over_dp,
    "dropout anew in backward": _dropout_anew_in_backward,
}
