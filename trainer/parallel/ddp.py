"""Data parallelism: gradients in buckets, summed over dp while backward still runs.

In: the parameters of this rank, in the order of forward, and how many backward passes make a step.
Out: after `finish()`, every `.grad` is the sum over dp and over the step's microbatches, once.
Sum, not mean: the loss is divided by the global number of tokens before backward, so that no
further factor depends on the layout. One all-reduce a bucket and step, none a microbatch.

    backward:  head ─► layer 3 ─► layer 2 ─► ...        .grad are views of the buckets
               [bucket 0 full: all_reduce][bucket 1 ...   launched in the same order on every rank
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from torch import Tensor, nn

    from trainer.mesh import Axis


class _Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device
        )
        self.missing = 0
        """Gradients still to be added in this step, over all parameters and microbatches."""
        self.sent = self.flat
        """What is summed over dp: the bucket, or a copy in the dtype in which gradients travel."""
        self.work: dist.Work | None = None

    def reset(self, passes: int) -> None:
        """Zero the gradients and lay each `.grad` on its place in the bucket."""
        self.flat.zero_()
        self.missing = passes * len(self.parameters)
        at = 0
        for p in self.parameters:
            p.grad = self.flat[at : at + p.numel()].view_as(p)
            at += p.numel()


class GradientBuckets:
    """All gradients of this rank, and their way over the dp axis."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        axis: Axis,
        *,
        bucket_bytes: int,
        passes: int,
        wire: torch.dtype,
    ) -> None:
        self.axis = axis
        self.passes = passes
        self.wire = wire
        # Backward reaches the last parameters first, so their buckets fill and leave first.
        self.buckets = [_Bucket(group) for group in pack(parameters[::-1], bucket_bytes)]
        self.starts: Mapping[str, int] = {}
        """Where this rank's piece of a parameter begins: each is whole here."""
        self._next = 0
        for bucket in self.buckets:
            for p in bucket.parameters:
                hook = partial(self._arrived, bucket)
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch

    def start(self) -> None:
        """Begin a step: gradients are zero."""
        self._next = 0
        for bucket in self.buckets:
            bucket.reset(self.passes)

    def backward_ended(self) -> None:
        """A backward is over, or the first half of one: nothing is held for it here."""

    def finish(self) -> None:
        """Wait until every bucket is summed; those that backward left incomplete go out now."""
        self._launch(len(self.buckets))
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                if bucket.sent is not bucket.flat:
                    bucket.flat.copy_(bucket.sent)
                bucket.sent, bucket.work = bucket.flat, None

    def updated(self) -> None:
        """The parameters have new values: every replica has computed the same."""

    def _arrived(self, bucket: _Bucket, _parameter: Tensor) -> None:
        """One gradient of `bucket` was added; buckets leave in order, the same on every rank."""
        bucket.missing -= 1
        ready = self._next
        while ready < len(self.buckets) and self.buckets[ready].missing == 0:
            ready += 1
        self._launch(ready)

    def _launch(self, until: int) -> None:
        for bucket in self.buckets[self._next : until]:
            bucket.sent = bucket.flat.to(self.wire)  # itself where it has that dtype
            bucket.work = self.axis.all_reduce(bucket.sent, wait=False)
        self._next = until


def pack(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, each group at most `bucket_bytes` or one parameter."""
    groups: list[list[nn.Parameter]] = []
    held = 0
    for p in parameters:
        size = p.numel() * p.element_size()
        if not groups or held + size > bucket_bytes or groups[-1][0].dtype != p.dtype:
            groups.append([])
            held = 0
        groups[-1].append(p)
        held += size
    return groups
