"""Gloo ranks that live on between runs: torch is imported once a process, not once a layout.

In: a function (importable by name), and cases with their number of ranks. Out: each rank's answer.
Each run has a process group of its own, so that 2, 4 and 8 ranks share the same processes. When a
rank fails, all are ended (its peers may wait for it forever) and the next run starts new ones.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    Work = Callable[[Any, int], Any]

_PATIENCE = 300.0
"""Seconds that one run may take; gloo itself gives up after _TIMEOUT."""
_TIMEOUT = 120.0
_GRACE = 3.0
"""Seconds in which the peers of a failed rank may still say what they saw."""


@dataclass(frozen=True)
class Failure:
    """Why a rank has no answer."""

    kind: str
    """Name of the exception's class; empty where there was none."""
    says: str
    trace: str = ""

    @property
    def line(self) -> str:
        """Both, in a line."""
        first = (self.says.splitlines() or [""])[0]
        return f"{self.kind}: {first}" if self.kind else first


class RanksFailedError(Exception):
    """A rank raised or ended; the text is the first one's traceback."""

    def __init__(self, first: Failure) -> None:
        super().__init__(first.trace or first.says)
        self.first = first


@dataclass(frozen=True)
class _Job:
    case: Any
    rank: int
    world: int
    store: str


class Pool:
    """Processes that run `work(case, world)` on every rank."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._numbers = itertools.count()

    def run(self, case: Any, world: int) -> list[Any]:
        """Every rank's answer, by rank. Raises RanksFailedError."""
        while len(self._ranks) < world:
            self._start()
        store = str(Path(self._folder.name, f"store-{next(self._numbers)}"))
        for rank, (_process, pipe) in enumerate(self._ranks[:world]):
            pipe.send(_Job(case, rank, world, store))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _PATIENCE
        failed: dict[int, Failure] = {}
        while len(answers) + len(failed) < world and time.monotonic() < deadline:
            silent = [rank for rank in range(world) if rank not in answers | failed]
            ready = wait([self._ranks[rank][1] for rank in silent], timeout=1.0)
            for rank in silent:
                if self._ranks[rank][1] not in ready:
                    continue
                good, answer = _receive(self._ranks[rank][1])
                if good:
                    answers[rank] = answer
                else:
                    deadline = min(deadline, time.monotonic() + _GRACE)
                    failed[rank] = answer
        if len(answers) < world:
            self._end()
            late = Failure("", f"no answer within {_PATIENCE:.0f} s")
            raise RanksFailedError(next(iter(failed.values()), late))
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """End the ranks, by asking."""
        for _process, pipe in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process, _pipe in self._ranks:
            process.join(10)
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(self._work, theirs), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, ours))

    def _end(self) -> None:
        for process, pipe in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()
            pipe.close()
        self._ranks = []


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        good, answer = pipe.recv()
    except EOFError:
        return False, Failure("", "a rank ended without a word")
    return bool(good), answer


def _serve(work: Work, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        try:
            if job.world > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{job.store}",
                    rank=job.rank,
                    world_size=job.world,
                    timeout=timedelta(seconds=_TIMEOUT),
                )
            answer = (True, work(job.case, job.world))
            if job.world > 1:
                dist.destroy_process_group()
                gc.collect()  # a model is full of circles, which keep its groups and their threads
        except Exception as error:  # noqa: BLE001 (told to the pool, which ends this process)
            why = Failure(type(error).__name__, str(error), traceback.format_exc())
            answer = (False, why)
        pipe.send(answer)
