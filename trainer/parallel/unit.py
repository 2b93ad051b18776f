"""A unit of ZeRO: parameters laid end to end, of which each rank of an axis has a share.

In: a Group of parameters, and how it is shared. Out: `values`, which the parameters are views of;
`master`, this rank's share, which the optimizer updates through `pieces`; and `gradient`, its sum.

    values    | rank 0's share | rank 1's share | ...   on the device; stage 3: while `here`
    own       this rank's share, of the same dtype: its place in values; in stage 3 memory of its
              own, on the device or (offload of parameters) on the host
    master    what is updated: own, or its like of the weights' dtype, in host memory with offload;
              `gradient` is where master is
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from trainer.mesh import Axis
    from trainer.parallel.offload import Lane, Mark

    Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Group:
    """Parameters that travel together, and the ranks that share them."""

    named: Sequence[Named]
    shard: Axis
    replica: Axis
    dtype: torch.dtype | None = None
    """In which values are gathered and computed with (stage 3); None: that of the parameters."""


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
        first = self.parameters[0].detach()
        whole_values = first.new_zeros(self.share * self.axis.size)
        self.missing = 0
        """Gradients still to come before the unit's are reduced."""
        self.passes = 0
        """Reductions still to come in this step."""
        self.here = True
        """Whether `values` has memory."""
        self.in_backward = False
        self._gather: dist.Work | None = None
        self._fetched: Mark | None = None
        torch.cat([p.detach().flatten() for p in self.parameters], out=whole_values[:whole])
        self.values = whole_values.to(group.dtype or first.dtype)
        at = 0
        for p in self.parameters:
            p.data = self.values[at : at + p.numel()].view_as(p)
            at += p.numel()
        own = slice(self.axis.index * self.share, (self.axis.index + 1) * self.share)
        self.place = self.values[own]
        """This rank's share of the values, whenever they are here."""
        self.gradients = torch.zeros_like(self.values) if self.stage == 1 else None
        self.hosted = sharing.offload != "none"
        self.fetched_up = sharing.offload == "parameters"
        """Whether `own` is in host memory."""
        self.own = self.place
        if self.stage == 3:
            self.own = lane.pinned(self.place) if self.fetched_up else torch.empty_like(self.place)
            self.own.copy_(self.place)
        self.master = self.own
        if self.hosted and not self.fetched_up:
            self.master = lane.pinned(whole_values[own])
        elif self.values is not whole_values:
            self.master = torch.empty_like(whole_values[own], device=self.own.device)
        if self.master is not self.own:
            self.master.copy_(whole_values[own])
        self.gradient = (
            torch.zeros_like(self.master, pin_memory=self.hosted and lane.stream is not None)
            if self.gradients is None or self.hosted
            else self.gradients[own]
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
        if not self.fetched_up:
            self._gather = self.axis.all_gather(self.values, self.own, wait=False)
            return
        with self.lane.open():
            self.place.copy_(self.own, non_blocking=True)
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
        """Begin to copy what was updated to where values are gathered from."""
        if self.master is self.own:
            return
        if not self.hosted or self.fetched_up:  # from one dtype to another, in one memory
            self.own.copy_(self.master)
            return
        with self.lane.open():
            self.own.copy_(self.master, non_blocking=True)
            self._fetched = self.lane.mark()

    def updated(self) -> None:
        """What is gathered from is new; below stage 3 the others' values are here too."""
        self.arrive()
        if self.stage < 3:
            self.axis.all_gather(self.values, self.own)
