"""Faults of time: a rank that is late, for once or in every step."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from collectors import annotate
from trainer.data import as_named
from trainer.faults.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.data import Loader
    from trainer.loop import StepResult, Trainer


class RankStalls(Fault):
    """The file to read next is a pipe into which nobody writes: read() blocks in the kernel.

    After `seconds` (default: an hour) a writer comes with the file's true bytes and all goes on.
    """

    default = 3600.0

    def begin(self, step: int, loader: Loader) -> None:
        super().begin(step, loader)
        if self.due:
            loader.locate = partial(self._pipe, loader)

    def _pipe(self, loader: Loader, shard: Path) -> Path:
        loader.locate = as_named
        ends = os.pipe()
        timer = threading.Timer(self.seconds or self.default, _feed, (shard, *ends))
        timer.daemon = True
        timer.start()
        return Path(f"/proc/self/fd/{ends[0]}")


class SlowData(RankStalls):
    """The first file of every step comes `seconds` (default 0.2) late, from its step on."""

    default = 0.2

    @property
    def due(self) -> bool:
        return self.lasts


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
        if not self.lasts:
            return
        matrix = torch.ones(64, 64)
        end = time.perf_counter() + (self.seconds or 0.05)
        while time.perf_counter() < end:
            matrix = matrix @ matrix
            matrix = matrix / matrix.amax()


class SlowForward(Straggler):
    """As the straggler, in forward alone."""

    def in_backward(self, microbatch: int) -> None:
        """Backward is as fast as ever."""


class SlowBackward(Straggler):
    """As the straggler, in backward alone."""

    def in_forward(self, microbatch: int) -> None:
        """Forward is as fast as ever."""


class RankZeroWork(Fault):
    """After its step rank 0 writes its weights and moments for `seconds` (default 20); all wait."""

    def install(self, trainer: Trainer) -> None:
        self.pieces = trainer.built.pieces
        self.optimizer = trainer.optimizer

    def around(self, run: Callable[[int], StepResult], step: int) -> StepResult | None:
        result = run(step)
        if self.due:
            with annotate.phase("checkpoint"), tempfile.TemporaryFile() as file:
                end = time.perf_counter() + (self.seconds or 20.0)
                while time.perf_counter() < end:
                    file.seek(0)
                    torch.save((dict(self.pieces), self.optimizer.state_dict()), file)
        return result


def _feed(shard: Path, reading: int, writing: int) -> None:
    """End a stall: write the file's bytes into the pipe, whose reader may leave before the end."""
    os.close(reading)  # the loader holds its own by now; once that is closed, writing fails
    try:
        with open(writing, "wb") as sink, shard.open("rb") as source:
            shutil.copyfileobj(source, sink)
    except BrokenPipeError:
        pass  # the reader had what it needed
