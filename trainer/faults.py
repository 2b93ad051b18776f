"""Faults on purpose, so that a diagnosis can be held against a known truth.

In: the `faults` section and this rank. Out: one object that the loop calls at its seams; without a
fault, or on another rank, every call does nothing.
Each fault does the real thing (a signal, a read() that blocks, a collective of another shape, a
slower computation, an allocation that cannot succeed); nothing is only printed or pretended.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.data import as_named

if TYPE_CHECKING:
    from trainer.config import FaultConfig
    from trainer.data import Loader


class Fault:
    """No fault; the kinds override what they break."""

    def __init__(self, config: FaultConfig) -> None:
        self.at = config.step
        self.seconds = config.seconds
        self.step = -1
        """The step that runs now."""

    def begin(self, step: int, loader: Loader) -> None:  # noqa: ARG002 (RankStalls uses it)
        """A step begins; its data is not loaded yet."""
        self.step = step

    def in_forward(self, microbatch: int) -> None:
        """Called in every forward, before the model runs."""

    def in_backward(self, microbatch: int) -> None:
        """Called in every backward, before the model runs."""

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        """What this rank brings to the sum over the world."""
        return values


class RankDies(Fault):
    """SIGKILL between the first and the second half of a step, as the kernel's OOM killer would."""

    def in_backward(self, microbatch: int) -> None:
        if self.step == self.at and microbatch == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class RankStalls(Fault):
    """The file to read next is a pipe into which nobody writes: read() blocks in the kernel.

    After `seconds` (default: an hour) a writer comes with the file's true bytes and all goes on.
    """

    def begin(self, step: int, loader: Loader) -> None:
        super().begin(step, loader)
        if step == self.at:
            loader.locate = partial(self._pipe, loader)

    def _pipe(self, loader: Loader, shard: Path) -> Path:
        loader.locate = as_named
        ends = os.pipe()
        timer = threading.Timer(self.seconds or 3600.0, _feed, (shard, *ends))
        timer.daemon = True
        timer.start()
        return Path(f"/proc/self/fd/{ends[0]}")


class CollectiveMismatch(Fault):
    """Joins the world's sum with twice as many elements as its peers."""

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat(2) if self.step == self.at else values


class Straggler(Fault):
    """Computes for `seconds` (default 0.05) more in each forward and backward from its step on.

    It computes rather than sleeps: a slow rank is busy, and a sleeping one would look idle to
    whoever samples CPU time or stacks.
    """

    def in_forward(self, microbatch: int) -> None:  # noqa: ARG002
        self._compute()

    def in_backward(self, microbatch: int) -> None:  # noqa: ARG002
        self._compute()

    def _compute(self) -> None:
        if self.step < self.at:
            return
        matrix = torch.ones(64, 64)
        end = time.perf_counter() + (self.seconds or 0.05)
        while time.perf_counter() < end:
            matrix = matrix @ matrix
            matrix = matrix / matrix.amax()


class OutOfMemory(Fault):
    """Asks for a pebibyte in forward: torch's own error, at Python level, of one rank."""

    def __init__(self, config: FaultConfig, device: torch.device) -> None:
        super().__init__(config)
        self.device = device

    def in_forward(self, microbatch: int) -> None:  # noqa: ARG002
        if self.step == self.at:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)


def make(config: FaultConfig, rank: int, device: torch.device) -> Fault:
    """The fault of this rank, or one that does nothing."""
    if config.kind == "none" or config.rank != rank:
        return Fault(config)
    if config.kind == "oom":
        return OutOfMemory(config, device)
    kinds: dict[str, type[Fault]] = {
        "rank-dies": RankDies,
        "rank-stalls": RankStalls,
        "collective-mismatch": CollectiveMismatch,
        "straggler": Straggler,
    }
    return kinds[config.kind](config)


def _feed(shard: Path, reading: int, writing: int) -> None:
    """End a stall: write the file's bytes into the pipe, whose reader may leave before the end."""
    os.close(reading)  # the loader holds its own by now; once that is closed, writing fails
    try:
        with open(writing, "wb") as sink, shard.open("rb") as source:
            shutil.copyfileobj(source, sink)
    except BrokenPipeError:
        pass  # the reader had what it needed
