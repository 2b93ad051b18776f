"""Faults that end a rank or take its memory."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import torch

from trainer.faults.fault import Fault

if TYPE_CHECKING:
    from trainer.config import FaultConfig
    from trainer.data import Loader

_LEAK = 16 << 20
"""Bytes a step, by default."""


class RankDies(Fault):
    """SIGKILL between the first and the second half of a step, as the kernel's OOM killer would."""

    def in_backward(self, microbatch: int) -> None:
        if self.due and microbatch == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class OutOfMemory(Fault):
    """Asks for a pebibyte in forward: torch's own error, at Python level, of one rank."""

    def __init__(self, config: FaultConfig, device: torch.device) -> None:
        super().__init__(config)
        self.device = device

    def in_forward(self, microbatch: int) -> None:  # noqa: ARG002
        if self.due:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)


class Leak(Fault):
    """Keeps a tensor of `bytes` more in every step from its step on, each byte of it written."""

    def __init__(self, config: FaultConfig, device: torch.device) -> None:
        super().__init__(config)
        self.device = device
        self.bytes = config.bytes or _LEAK
        self.kept: list[torch.Tensor] = []

    def begin(self, step: int, loader: Loader) -> None:
        super().begin(step, loader)
        if self.lasts:
            self.kept.append(torch.ones(self.bytes, dtype=torch.uint8, device=self.device))
