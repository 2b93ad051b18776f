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

import torch
from torch import Tensor, nn

from trainer.parallel.offload import Lane, Mark
from trainer.parallel.prefetch import Prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist

    from trainer.mesh import Axis

    Named = tuple[str, nn.Parameter]

_OUTSTANDING = 2
"""Reductions, and copies to the host, under way at once; each holds a bucket of gradients."""


@dataclass(frozen=True)
class Group:
    """Parameters that travel together, and the ranks that share them."""

    named: Sequence[Named]
    shard: Axis
    replica: Axis


@dataclass(frozen=True)
class Sharing:
    """What is shared, and where shares live."""

    stage: int
    wire: torch.dtype
    """In which gradients travel."""
    offload: str = "none"
    """As memory.offload."""
    ahead: int = 0
    """Units gathered before they are needed."""


class Unit:
    """Parameters laid end to end, padded so that every rank has the same share."""

    def __init__(self, group: Group, sharing: Sharing, lane: Lane) -> None:
        self.stage = sharing.stage
        self.lane = lane
        self.axis, self.replica = group.shard, group.replica
        self.parameters = [p for _, p in group.named]
        whole = sum(p.numel() for p in self.parameters)
        self.share = -(-whole // self.axis.size)
        first = self.parameters[0]
        self.values = first.new_zeros(self.share * self.axis.size).detach()
        self.missing = 0
        """Gradients still to come before the unit's are reduced."""
        self.passes = 0
        """Reductions still to come in this step."""
        self.here = True
        """Whether `values` has memory."""
        self.in_backward = False
        self._gather: dist.Work | None = None
        self._fetched: Mark | None = None
        at = 0
        for p in self.parameters:
            view = self.values[at : at + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            at += p.numel()
        own = slice(self.axis.index * self.share, (self.axis.index + 1) * self.share)
        self.place = self.values[own]
        """This rank's share of the values, whenever they are here."""
        self.resident = self.stage == 3 and sharing.offload != "parameters"
        """Whether the share has memory of its own on the device."""
        self.own = self.place.clone() if self.resident else self.place
        self.gradients = torch.zeros_like(self.values) if self.stage == 1 else None
        self.hosted = sharing.offload != "none"
        if self.hosted:
            self.master = lane.pinned(self.own)
            self.master.copy_(self.own)
            self.gradient = torch.zeros_like(self.master, pin_memory=lane.stream is not None)
        else:
            self.master = self.own
            self.gradient = (
                torch.zeros_like(self.own) if self.gradients is None else self.gradients[own]
            )
        self.pieces, self.starts = self._cut(group.named, own.start)
        if self.stage == 3:
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
                piece = nn.Parameter(self.master[low - start : high - start])
                piece.grad = self.gradient[low - start : high - start]
                pieces[path], starts[path] = piece, low - at
            at += p.numel()
        return pieces, starts

    def reset(self, passes: int) -> None:
        """Gradients are zero, and `passes` backward passes will add to them."""
        self.gradient.zero_()
        self.missing = len(self.parameters)
        self.passes = passes
        if self.gradients is None:
            return
        self.missing *= passes
        self.passes = 1
        self.gradients.zero_()
        at = 0
        for p in self.parameters:
            p.grad = self.gradients[at : at + p.numel()].view_as(p)
            at += p.numel()

    def take(self, wire: torch.dtype) -> Tensor:
        """All gradients to be reduced, flat and padded; from stage 2 on they are gone from here."""
        if self.gradients is not None:
            return self.gradients.to(wire)
        flat = torch.zeros(self.values.numel(), dtype=wire, device=self.values.device)
        at = 0
        for p in self.parameters:
            if p.grad is not None:
                flat[at : at + p.numel()].copy_(p.grad.flatten())
            p.grad = None
            at += p.numel()
        return flat

    def fetch(self) -> None:
        """Stage 3: begin to have all values here; `arrive` waits."""
        if self.here:
            return
        self.values.untyped_storage().resize_(self.values.numel() * self.values.element_size())
        self.here = True
        if self.resident:
            self._gather = self.axis.all_gather(self.values, self.own, wait=False)
            return
        with self.lane.open():
            self.place.copy_(self.master, non_blocking=True)
            self._gather = self.axis.all_gather(self.values, self.place, wait=False)
            self._fetched = self.lane.mark()

    def arrive(self) -> None:
        """Wait for what `fetch` began; on CUDA it is computation that waits, not the host."""
        if self._gather is not None:
            self._gather.wait()
        if self._fetched is not None:
            self._fetched.hold_device()
        self._gather = self._fetched = None

    def free(self) -> None:
        """Give the memory of the values back; views of it stay and see the next gather."""
        self.arrive()
        self.values.untyped_storage().resize_(0)
        self.here = False

    def bring_up(self) -> None:
        """Begin to copy what the host updated to where the device keeps it."""
        if self.hosted and (self.resident or self.stage < 3):
            with self.lane.open():
                self.own.copy_(self.master, non_blocking=True)
                self._fetched = self.lane.mark()

    def updated(self) -> None:
        """The device computes with the new values; below stage 3, with the others' too."""
        self.arrive()
        if self.stage < 3:
            self.axis.all_gather(self.values, self.own)


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
        self._landing: deque[tuple[Unit, Tensor, Tensor, Mark]] = deque()
        """Copies to the host: whose, of what (it must live until then), where, and when."""
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
                self._over_replicas(unit, torch.zeros_like(unit.own, dtype=self.sharing.wire))
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
        then = self._keep if unit.passes or unit.replica.group is None else self._over_replicas
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
            unit.gradient.zero_()
        work = unit.replica.all_reduce(whole, wait=False)
        self._under_way.append(_Sum(work, unit, whole, summed, self._keep))

    def _keep(self, unit: Unit, summed: Tensor) -> None:
        """Add a sum to the share's gradient, where that lives."""
        if unit.hosted:
            self._landing.append((unit, summed, *self.lane.to_host(summed)))
            self._land(keep=_OUTSTANDING)
        elif unit.stage == 1:  # comes once, to where this rank's own part of it lay
            unit.gradient.copy_(summed)
        else:
            unit.gradient += summed

    def _settle(self, keep: int) -> None:
        """End all but the `keep` newest sums; what follows one may begin another."""
        while len(self._under_way) > keep:
            one = self._under_way.popleft()
            if one.work is not None:
                one.work.wait()
            one.then(one.unit, one.summed)

    def _land(self, keep: int) -> None:
        """Add what has come to the host, but for the `keep` newest copies."""
        while len(self._landing) > keep:
            unit, _summed, landed, mark = self._landing.popleft()
            mark.hold_host()
            unit.gradient += landed
