"""When checkpoints are written, and how that goes on beside the training.

In: a Trainer on every rank, and the config's `checkpoint` section. Out: whole checkpoints in a
folder (shelf.py), in torch's DCP format (plans.py).

    every rank   copy ──► step ──► step ──► step ──► all written? ──► step
                   └─ side thread: write own file ─┘      │
    rank 0                                                └─ side thread: .metadata, rename, latest

The side threads never communicate: a collective from two threads has no order, and one that waits
for a disk looks like a hang. While a write is under way all ranks ask after each step whether all
have written. A checkpoint that cannot be written is told and given up; training goes on.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from collectors import annotate
from trainer.checkpoint import resume, snapshot, state
from trainer.checkpoint.plans import SavePlanner
from trainer.checkpoint.resume import line_of
from trainer.checkpoint.shelf import Shelf, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

    from trainer.checkpoint.plans import Entry
    from trainer.loop import Trainer

_SHOWN = 3
"""Ranks whose failures a line names."""


class CheckpointError(Exception):
    """A rank could not write its part; the text is one line."""


class _Side(threading.Thread):
    """Work beside the training; what it raised is kept for whoever joins it.

    A daemon: an error in training must not wait for a disk. What it leaves is half-written.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._work = work
        self.answer: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._work()
        except Exception as error:  # noqa: BLE001 (raised again, or told, in the main thread)
            self.error = error


@dataclass(frozen=True)
class _Agreed:
    """What all ranks agreed on before the first write."""

    plan: SavePlan
    """What this rank writes."""
    metadata: Metadata | None
    """Of all; rank 0 only."""


@dataclass
class Saver:
    """The checkpoints of one run; every rank has one and calls the same methods."""

    trainer: Trainer
    say: Callable[[str], None]
    """Takes a line for people; called on rank 0 only."""
    warn: Callable[[str], None]
    """Takes a line about what went wrong; called on rank 0 only."""
    _planner: SavePlanner = field(default_factory=SavePlanner)
    _agreed: _Agreed | None = None
    _step: int = 0
    """Steps done in the checkpoint that is under way."""
    _writing: _Side | None = None
    _publishing: _Side | None = None
    _good: bool = True
    """Whether the last one was written; only rank 0 knows."""

    def __post_init__(self) -> None:
        self._config = self.trainer.config.checkpoint
        self._rank = self.trainer.mesh.rank
        self._shelf = Shelf(Path(self._config.folder), self._config.keep)

    def resume(self) -> int:
        """Bring the trainer where the config says; the number of the step that comes next.

        Raises ConfigError, on every rank: no such checkpoint, of another model, or not readable.
        """
        return resume.resume(self.trainer, self._shelf, self.say)

    def after(self, number: int) -> None:
        """Step `number` has ended: write a checkpoint when one is due. Every rank calls this."""
        if not self._config.folder:
            return
        done, every = number + 1, self._config.every
        due = done == self.trainer.config.train.steps or (every > 0 and done % every == 0)
        if not due and self._writing is None and self._publishing is None:
            return
        with annotate.phase("checkpoint"):
            self._look(wait=due)
            if due:
                self._begin(done)
                if not self._config.background:
                    self._look(wait=True)

    def close(self) -> bool:
        """Wait for what is under way; whether the last one was written, as far as this rank knows:
        rank 0 publishes it, and the others need not wait."""
        with annotate.phase("checkpoint"):
            self._look(wait=True)
        return self._good

    def _begin(self, step: int) -> None:
        self._step = step
        writer = FileSystemWriter(self._shelf.part(step), per_thread_copy_ahead=0)
        entries = state.entries(self.trainer)
        if self._agreed is None:
            self._agreed = self._agree(writer, entries)
        plan = self._agreed.plan
        self._planner.bring(entries, plan, copy=self._config.background)
        text = snapshot.take(self.trainer, step) if self._rank == 0 else ""

        def work() -> list[WriteResult]:
            writer.prepare_local_plan(plan)  # makes the folder
            if text:
                write(self._shelf.part(step) / snapshot.FILES[1], text)
            written: list[WriteResult] = writer.write_data(plan, self._planner).wait()
            return written

        self._writing = _Side(work)

    def _agree(self, writer: StorageWriter, entries: list[Entry]) -> _Agreed:
        """Who writes what: all tell rank 0 what they hold, which deals out what several hold."""
        mesh = self.trainer.mesh
        told = mesh.to_first(self._planner.local(entries))
        plans, metadata = None, None
        if told is not None:
            plans, metadata = self._planner.create_global_plan(told)
            plans = writer.prepare_global_plan(plans)
        return _Agreed(mesh.deal(plans), metadata)

    def _look(self, *, wait: bool) -> None:
        """See how far the checkpoint under way is; with `wait`, see it to its end."""
        if self._writing is not None:
            if wait:
                self._writing.join()
            writing = torch.tensor(
                float(self._writing.is_alive()), dtype=torch.float64, device=self.trainer.device
            )
            self.trainer.mesh.sum_over_world(writing)
            if writing.item() == 0:
                error = self._writing.error
                why = "" if error is None else line_of(error)
                told = self.trainer.mesh.to_first((self._writing.answer, why))
                self._writing = None
                if told is not None:
                    self._publishing = _Side(partial(self._publish, self._step, told))
        if self._publishing is not None and (wait or not self._publishing.is_alive()):
            self._publishing.join()
            self._tell(self._publishing)
            self._publishing = None

    def _publish(self, step: int, told: list[tuple[list[WriteResult] | None, str]]) -> None:
        """Rank 0, on the side: all have written, or tried to; let the checkpoint count, or go."""
        try:
            if failed := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(told) if why]:
                raise CheckpointError("; ".join(failed[:_SHOWN]))
            if self._agreed is None or self._agreed.metadata is None:
                raise RuntimeError("a checkpoint was written before its plan was made")
            writer = FileSystemWriter(self._shelf.part(step))
            metadata = dataclasses.replace(self._agreed.metadata)
            writer.finish(metadata, [results or [] for results, _ in told])
            self._shelf.publish(step)
        except Exception:
            self._shelf.drop(step)
            raise

    def _tell(self, side: _Side) -> None:
        """Say, on rank 0, how the last checkpoint went."""
        self._good = side.error is None
        if side.error is not None:
            good = self._shelf.kept[0] if self._shelf.kept else "none"
            self.warn(
                f"the checkpoint after {self._step} steps was not written: {line_of(side.error)}; "
                f"the last good one is {good}"
            )
