"""Bugs of trainers with experts, planted on demand as those of bugs.py are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING
from unittest import mock

from trainer.mlp import Router

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from trainer.loop import Trainer

    Plant = Callable[[Trainer], AbstractContextManager[object]]


def _router_reduced_twice(trainer: Trainer) -> AbstractContextManager[object]:
    """Router gradients, already summed over dp, are summed again."""
    buckets = trainer.built.buckets
    real = buckets.finish

    def finish() -> None:
        real()
        for router in trainer.built.routers:
            trainer.mesh.data.all_reduce(router.weight.grad)

    return mock.patch.object(buckets, "finish", finish)


def _experts_over_all_of_dp(trainer: Trainer) -> AbstractContextManager[object]:
    """Expert gradients are summed over all data ranks, which hold other experts, as dense ones."""
    buckets = trainer.built.buckets
    real = buckets.finish

    def finish() -> None:
        real()
        _, experts = buckets.sets
        for bucket in experts.buckets:
            trainer.mesh.ep.all_reduce(bucket.flat)

    return mock.patch.object(buckets, "finish", finish)


def _balance_once_a_tp_rank(trainer: Trainer) -> AbstractContextManager[object]:
    """Every tp rank adds the balance loss as if it were alone; their gradients are summed."""
    for router in trainer.built.routers:
        router.share *= trainer.mesh["tp"].size
    return nullcontext()


def _places_alone(trainer: Trainer) -> AbstractContextManager[object]:
    """Each cp rank gives away places by the positions that it sees."""
    for router in trainer.built.routers:
        router.__class__ = Router
    return nullcontext()


def _router_not_summed(trainer: Trainer) -> AbstractContextManager[object]:
    """The router's gradient, a part on each tp rank, is taken for the whole."""
    return mock.patch.object(trainer.built.partial, "finish", lambda: None)


EXPERT_PLANTS: dict[str, Plant] = {
    "router gradient reduced twice": _router_reduced_twice,
    "expert gradient over all of dp": _experts_over_all_of_dp,
    "balance once a tp rank": _balance_once_a_tp_rank,
    "places by each cp rank alone": _places_alone,
    "router gradient of a part": _router_not_summed,
}
