"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): replicas share what each would hold alone.

In: parameters in groups that travel together, and the axis of the replicas. Out: `pieces`, the
part of every parameter that this rank updates; after `finish()` their `.grad` is the sum over all
replicas and microbatches, after `updated()` every rank computes with the new values.

    stage 1   gradients summed everywhere once a step, each rank updates its share, shares gathered
    stage 2   + gradients reduce-scattered after each backward: only the own share is kept
    stage 3   + parameters kept as shares, gathered for a module's forward and backward, then freed
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.mesh import Axis

    Named = tuple[str, nn.Parameter]

_OUTSTANDING = 2
"""Reduce-scatters under way at once; each holds a bucket of gradients."""


class _Unit:
    """Parameters laid end to end, padded so that every rank has the same share."""

    def __init__(self, named: Sequence[Named], axis: Axis, stage: int) -> None:
        self.stage = stage
        self.axis = axis
        self.parameters = [p for _, p in named]
        whole = sum(p.numel() for p in self.parameters)
        self.share = -(-whole // axis.size)
        first = self.parameters[0]
        self.values = first.new_zeros(self.share * axis.size).detach()
        self.missing = 0
        """Gradients still to come before the unit's are reduced."""
        self.here = True
        """Whether `values` has memory."""
        self.in_backward = False
        at = 0
        for p in self.parameters:
            view = self.values[at : at + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            at += p.numel()
        own = slice(axis.index * self.share, (axis.index + 1) * self.share)
        self.own = self.values[own].clone() if stage == 3 else self.values[own]
        self.gradients = torch.zeros_like(self.values) if stage == 1 else None
        self.gradient = (
            torch.zeros_like(self.own) if self.gradients is None else self.gradients[own]
        )
        self.pieces, self.starts = self._cut(named, own.start)
        if stage == 3:
            self.free()

    def _cut(
        self, named: Sequence[Named], start: int
    ) -> tuple[dict[str, nn.Parameter], dict[str, int]]:
        """This rank's piece of each parameter that its share touches, and where it begins."""
        pieces, starts = {}, {}
        at = 0
        for path, p in named:
            low, high = max(at, start), min(at + p.numel(), start + self.share)
            if low < high:
                piece = nn.Parameter(self.own[low - start : high - start])
                piece.grad = self.gradient[low - start : high - start]
                pieces[path], starts[path] = piece, low - at
            at += p.numel()
        return pieces, starts

    def reset(self, passes: int) -> None:
        self.gradient.zero_()
        self.missing = len(self.parameters)
        if self.gradients is None:
            return
        self.missing *= passes
        self.gradients.zero_()
        at = 0
        for p in self.parameters:
            p.grad = self.gradients[at : at + p.numel()].view_as(p)
            at += p.numel()

    def take(self) -> Tensor:
        """All gradients of one backward, flat and padded; they are gone from the parameters."""
        flat = self.own.new_zeros(self.share * self.axis.size)
        at = 0
        for p in self.parameters:
            if p.grad is not None:
                flat[at : at + p.numel()].copy_(p.grad.flatten())
            p.grad = None
            at += p.numel()
        return flat

    def gather(self) -> None:
        """Have all values here (stage 3)."""
        if not self.here:
            size = self.share * self.axis.size * self.own.element_size()
            self.values.untyped_storage().resize_(size)
            self.here = True
            self.axis.all_gather(self.values, self.own)

    def updated(self) -> None:
        """Stages 1 and 2: fetch what the other ranks updated."""
        if self.stage < 3:
            self.axis.all_gather(self.values, self.own.clone())

    def free(self) -> None:
        """Give the memory of the values back; views of it stay and see the next gather."""
        self.values.untyped_storage().resize_(0)
        self.here = False


class ShardedReplicas:
    """All parameters of this rank under ZeRO; takes the place of GradientBuckets."""

    def __init__(
        self, groups: Sequence[Sequence[Named]], axis: Axis, *, stage: int, passes: int
    ) -> None:
        self.axis = axis
        self.stage = stage
        self.passes = passes
        self.buckets = [_Unit(group, axis, stage) for group in groups]
        self.pieces: Mapping[str, nn.Parameter] = {
            path: piece for unit in self.buckets for path, piece in unit.pieces.items()
        }
        self.starts: Mapping[str, int] = {
            path: start for unit in self.buckets for path, start in unit.starts.items()
        }
        self._under_way: deque[tuple[dist.Work | None, Tensor, Tensor, _Unit]] = deque()
        for unit in self.buckets:
            for p in unit.parameters:
                hook = partial(self._arrived, unit)
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch

    def wrap(self, module: nn.Module, unit: _Unit) -> None:
        """Stage 3: the unit's values are here while `module` runs, forward or backward."""

        def before(_module: nn.Module, _args: Any) -> None:
            unit.gather()

        def backward(gradient: Tensor) -> Tensor:
            unit.in_backward = True
            unit.gather()
            return gradient

        def after(_module: nn.Module, _args: Any, out: Tensor) -> None:
            if out.requires_grad and not unit.in_backward:
                out.register_hook(backward)  # type: ignore[no-untyped-call]  # torch
            if not unit.in_backward:  # else: recomputed by checkpointing, and needed right after
                unit.free()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def start(self) -> None:
        """Begin a step: gradients are zero."""
        for unit in self.buckets:
            unit.reset(self.passes)

    def finish(self) -> None:
        """Reduce what is left and wait until every own share is summed."""
        for unit in self.buckets:
            if any(p.grad is not None for p in unit.parameters) and unit.missing:
                self._reduce(unit)
        self._settle(keep=0)

    def updated(self) -> None:
        """The pieces have new values: let every rank have them."""
        for unit in self.buckets:
            unit.updated()

    def _arrived(self, unit: _Unit, _parameter: Tensor) -> None:
        unit.missing -= 1
        if unit.missing == 0:
            self._reduce(unit)

    def _reduce(self, unit: _Unit) -> None:
        group = self.axis.group
        if unit.gradients is not None:
            work = dist.all_reduce(unit.gradients, group=group, async_op=True) if group else None
            self._under_way.append((work, unit.gradient, unit.gradients, unit))
            return
        unit.missing = len(unit.parameters)
        if unit.stage == 3:
            unit.in_backward = False
            unit.free()
        flat = unit.take()
        summed = torch.empty_like(unit.own)
        work = self.axis.reduce_scatter(summed, flat, wait=False)
        self._under_way.append((work, summed, flat, unit))
        self._settle(keep=_OUTSTANDING)

    def _settle(self, keep: int) -> None:
        while len(self._under_way) > keep:
            work, summed, _whole, unit = self._under_way.popleft()
            if work is not None:
                work.wait()
            if unit.gradients is None:
                unit.gradient += summed
