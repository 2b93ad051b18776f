"""All gradients of a rank, where not all parameters have the same replicas.

In: one set of buckets for each kind of replicas: dense parameters over dp x cp, experts over those
of them that hold the same experts. Out: the same calls for all sets together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.parallel.zero import ShardedReplicas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from trainer.parallel.ddp import GradientBuckets


class Replicas:
    """Buckets or units of several sets, each summed over its own axis."""

    def __init__(self, sets: Sequence[GradientBuckets | ShardedReplicas]) -> None:
        self.sets = sets
        self.passes = sets[0].passes
        self.buckets = [bucket for one in sets for bucket in one.buckets]
        self.starts: Mapping[str, int] = {
            path: start for one in sets for path, start in one.starts.items()
        }
        """Where this rank's piece of a parameter begins, where it is not whole."""
        self.pieces: Mapping[str, nn.Parameter] = {
            path: piece
            for one in sets
            if isinstance(one, ShardedReplicas)
            for path, piece in one.pieces.items()
        }
        """This rank's shares under ZeRO; empty without."""

    def start(self) -> None:
        """Begin a step: gradients are zero."""
        for one in self.sets:
            one.start()

    def backward_ended(self) -> None:
        """A backward is over, or the first half of one; gradients may still come."""
        for one in self.sets:
            one.backward_ended()

    def finish(self) -> None:
        """Wait until every gradient is summed; call once a step, after its last backward."""
        for one in self.sets:
            one.finish()

    def updated(self) -> None:
        """The pieces have new values: let every rank have them."""
        for one in self.sets:
            one.updated()
