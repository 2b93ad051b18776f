"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): replicas share what each would hold alone.

In: parameters in groups that travel together, each with the axis whose ranks share it and the axis
of those that hold the same share (hybrid sharding, arXiv:2304.11277). Out: `pieces`, the part of
every parameter that this rank updates, on the device or in host memory; after `finish()` their
`.grad` is the sum over all replicas and microbatches, after `updated()` every rank computes with
the new values.

    stage 1   gradients reduce-scattered once a step, each rank updates its share, shares gathered
    stage 2   + gradients reduce-scattered after each backward: only the own share is kept
    stage 3   + parameters kept as shares, gathered for a module's forward and backward, then freed
    hybrid    + own shares all-reduced over the replicas, once a step
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.parallel.offload import Lane
from trainer.parallel.prefetch import Prefetch
from trainer.parallel.unit import Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor, nn

    from trainer.parallel.offload import Mark
    from trainer.parallel.unit import Group, Sharing

_OUTSTANDING = 2
"""Reductions, and copies to the host, under way at once; each holds a bucket of gradients."""


@dataclass(frozen=True)
class _Sum:
    """A reduction under way."""

    work: dist.Work | None
    unit: Unit
    summed: Tensor
    source: Tensor
    """It must live until the work is done."""
    then: Callable[[Unit, Tensor], None]
    """What is to be done with the sum."""


@dataclass(frozen=True)
class _Landing:
    """A copy to the host under way."""

    source: Tensor
    """It must live until the mark is passed."""
    landed: Tensor
    mark: Mark
    then: Callable[[Tensor], Tensor]
    """What is to be done with what has landed."""


class ShardedReplicas:
    """All parameters of this rank under ZeRO; takes the place of GradientBuckets."""

    def __init__(self, groups: Sequence[Group], sharing: Sharing, *, passes: int) -> None:
        self.sharing = sharing
        self.passes = passes
        device = groups[0].named[0][1].device
        self.lane = Lane(device)
        self.buckets = [Unit(group, sharing, self.lane) for group in groups]
        self.prefetch = Prefetch(self.buckets if sharing.stage == 3 else [], sharing.ahead)
        self.pieces: Mapping[str, nn.Parameter] = {
            path: piece for unit in self.buckets for path, piece in unit.pieces.items()
        }
        self.starts: Mapping[str, int] = {
            path: start for unit in self.buckets for path, start in unit.starts.items()
        }
        self._under_way: deque[_Sum] = deque()
        self._landing: deque[_Landing] = deque()
        for unit in self.buckets:
            for p in unit.parameters:
                hook = partial(self._arrived, unit)
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch

    def wrap(self, module: nn.Module, unit: Unit) -> None:
        """Stage 3: the unit's values are here while `module` runs, forward or backward.

        They go when the gradient of its input is made: those of its parameters may come much later
        (see halves.py), with other forwards between.
        """

        def before(_module: nn.Module, args: Any) -> None:
            if unit.in_backward:  # recomputed by checkpointing, and here already
                return
            self.prefetch.use(unit)
            if args[0].requires_grad:
                args[0].register_hook(passed)

        def passed(gradient: Tensor) -> Tensor:
            self._leave(unit)
            return gradient

        def backward(gradient: Tensor) -> Tensor:
            unit.in_backward = True
            self.prefetch.use(unit)
            return gradient

        def after(_module: nn.Module, _args: Any, out: Tensor) -> None:
            if unit.in_backward:  # recomputed, and needed right after
                return
            if out.requires_grad:
                out.register_hook(backward)  # type: ignore[no-untyped-call]  # torch
            self.prefetch.done(unit)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def start(self) -> None:
        """Begin a step: gradients are zero."""
        self.prefetch.start()
        for unit in self.buckets:
            unit.reset(self.passes)

    def backward_ended(self) -> None:
        """A backward is over, or the half of one that needs values."""
        for unit in self.buckets:
            if unit.in_backward:  # its input asks for no gradient, which would have told
                self._leave(unit)

    def finish(self) -> None:
        """Reduce what is left and wait until every own share is summed, and is with its pieces."""
        for unit in self.buckets:
            if unit.missing and any(p.grad is not None for p in unit.parameters):
                self._reduce(unit)
        self._settle(keep=0)
        for unit in self.buckets:
            if unit.passes and unit.replica.group is not None:  # not every backward reached it
                self._over_replicas(
                    unit, unit.values.new_zeros(unit.share, dtype=self.sharing.wire)
                )
        self._settle(keep=0)
        self._land(keep=0)
        self.prefetch.end()

    def updated(self) -> None:
        """The pieces have new values: let every rank have them."""
        for unit in self.buckets:
            unit.bring_up()
        for unit in self.buckets:
            unit.updated()

    def _arrived(self, unit: Unit, _parameter: Tensor) -> None:
        unit.missing -= 1
        if unit.missing == 0:
            self._reduce(unit)

    def _leave(self, unit: Unit) -> None:
        """Stage 3: this backward needs the unit's values no longer."""
        unit.in_backward = False
        self.prefetch.done(unit)

    def _reduce(self, unit: Unit) -> None:
        """Begin to sum a unit's gradients over the ranks that share it."""
        if unit.stage > 1:
            unit.missing = len(unit.parameters)
        if unit.stage == 3:
            self._leave(unit)
        flat = unit.take(self.sharing.wire)
        summed = flat.new_empty(unit.share)
        unit.passes -= 1
        then = self._add if unit.stage > 1 else self._replace  # stage 1: comes once
        if not unit.passes and unit.replica.group is not None:
            then = self._over_replicas
        work = unit.axis.reduce_scatter(summed, flat, wait=False)
        self._under_way.append(_Sum(work, unit, summed, flat, then))
        self._settle(keep=_OUTSTANDING)

    def _over_replicas(self, unit: Unit, summed: Tensor) -> None:
        """The step's last share: begin to sum what all its backwards gave over the replicas."""
        whole = summed
        if unit.stage > 1 and self.passes > 1:
            self._land(keep=0)
            before = unit.gradient.to(summed.device, non_blocking=True)
            whole = (before + summed).to(summed.dtype)
        work = unit.replica.all_reduce(whole, wait=False)
        self._under_way.append(_Sum(work, unit, whole, summed, self._replace))

    def _add(self, unit: Unit, summed: Tensor) -> None:
        """A sum over one backward, for the share's gradient, where that lives."""
        if unit.hosted:
            self._take_down(summed, unit.gradient.add_)
        else:
            unit.gradient += summed

    def _replace(self, unit: Unit, summed: Tensor) -> None:
        """The step's whole sum, for the share's gradient, where that lives."""
        if unit.hosted:
            self._take_down(summed, unit.gradient.copy_)
        else:
            unit.gradient.copy_(summed)

    def _take_down(self, summed: Tensor, then: Callable[[Tensor], Tensor]) -> None:
        """Begin to copy a sum to the host, where `then` takes it."""
        self._landing.append(_Landing(summed, *self.lane.to_host(summed), then))
        self._land(keep=_OUTSTANDING)

    def _settle(self, keep: int) -> None:
        """End all but the `keep` newest sums; what follows one may begin another."""
        while len(self._under_way) > keep:
            one = self._under_way.popleft()
            if one.work is not None:
                one.work.wait()
            one.then(one.unit, one.summed)

    def _land(self, keep: int) -> None:
        """Take what has come to the host, but for the `keep` newest copies."""
        while len(self._landing) > keep:
            one = self._landing.popleft()
            one.mark.hold_host()
            one.then(one.landed)
