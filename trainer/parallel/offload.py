"""Copies between a device and host memory, beside computation.

In: tensors on the device, and their places on the host, which `pinned` makes. Out: `Lane.open()`,
within which copies are queued on a stream of their own, and marks, by which the device or the host
waits for them. Host memory is pinned on CUDA, else a copy would block the host.
On a CPU a copy to the host is one from memory to memory, done at once: what is computed is the
same, and so the path is proved where there is no GPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Lane:
    """A stream for copies; on a CPU there is none, and all happens in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch

    @contextmanager
    def open(self) -> Iterator[None]:
        """What is queued within runs on the lane, after all that computation has queued so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Mark:
        """The point that the lane has reached when all queued on it so far is done."""
        return Mark(self.stream.record_event() if self.stream else None)

    def pinned(self, like: Tensor) -> Tensor:
        """Host memory of the same shape, without values."""
        return torch.empty(
            like.shape, dtype=like.dtype, device="cpu", pin_memory=self.stream is not None
        )

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Mark]:
        """A copy on its way to the host; `tensor` must live until the mark is passed."""
        landing = self.pinned(tensor)
        with self.open():
            landing.copy_(tensor, non_blocking=True)
            return landing, self.mark()


class Mark:
    """A point on a lane."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def hold_device(self) -> None:
        """What computation queues from here on runs after the mark; the host goes on."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def hold_host(self) -> None:
        """Return when the mark is passed."""
        if self.event is not None:
            self.event.synchronize()
