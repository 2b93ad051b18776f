"""How a run goes on from a checkpoint, whatever layout wrote it, as if it had never stopped.

In: a Trainer that was just built, on every rank, and the config's `checkpoint` section. Out: the
trainer with the checkpoint's values, and the number of its next step. Rank 0 alone looks for the
checkpoint and judges it, so that all ranks hear the same; each rank reads what it needs.

DCP's .metadata is a pickle, which runs what it says: resume only from checkpoints of your own.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from collectors import annotate
from trainer.checkpoint import snapshot, state
from trainer.checkpoint.plans import LoadPlanner
from trainer.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.checkpoint.shelf import Shelf
    from trainer.loop import Trainer

_MOST_SHOWN = 300
"""Characters of an error that a line shows."""


@dataclass(frozen=True)
class _Found:
    """What rank 0 found to resume from."""

    path: Path | None
    kept: snapshot.Snapshot | None = None
    problems: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def resume(trainer: Trainer, shelf: Shelf, say: Callable[[str], None]) -> int:
    """Load what the config asks for; the number of the step that comes next.

    `say` takes lines for people, on rank 0. Raises ConfigError, on every rank.
    """
    asked = trainer.config.checkpoint
    if not asked.folder and asked.resume in {"auto", "none"}:
        return 0
    with annotate.phase("checkpoint"):
        found = trainer.mesh.from_first(partial(_find, trainer, shelf))
        if found.problems:
            raise ConfigError(found.problems)
        if found.path is None or found.kept is None:
            return 0
        _load(trainer, found.path)
        trainer.scale.load_state_dict(found.kept.scale)
    if trainer.mesh.rank == 0:
        for line in (f"resumed from {found.path} after {found.kept.step} steps", *found.told):
            say(line)
    return found.kept.step


def line_of(error: BaseException) -> str:
    """What is at the root of an error, in one line: torch wraps what the disk said."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    for each in reversed(chain):
        if isinstance(each, OSError) and each.strerror:
            return f"{each.strerror}: {each.filename}" if each.filename else each.strerror
    text = str(error).strip().splitlines()
    return text[0][:_MOST_SHOWN] if text else type(error).__name__


def _find(trainer: Trainer, shelf: Shelf) -> _Found:
    asked = trainer.config.checkpoint
    try:
        if asked.folder:
            shelf.clean()
            shelf.kept = [] if asked.resume == "none" else shelf.known()
    except OSError as error:
        return _Found(None, problems=[f"checkpoint.folder={shelf.folder}: {error.strerror}"])
    if asked.resume in {"auto", "none"}:
        whole = [one for one in shelf.kept if snapshot.whole(shelf.folder / one)]
        path = shelf.folder / whole[0] if whole else None
    else:
        path = Path(asked.resume)
    if path is None:
        return _Found(None)
    if not snapshot.whole(path):
        why = f"{path} is no whole checkpoint, which has {' and '.join(snapshot.FILES)}"
        return _Found(None, problems=[f"{why} (checkpoint.resume=auto, or a step-* folder)"])
    try:
        kept = snapshot.read(path)
        FileSystemReader(path).read_metadata()
    except Exception as error:  # noqa: BLE001 (a damaged pickle may raise anything)
        return _Found(None, problems=[f"{path} cannot be resumed: {line_of(error)}"])
    refused, told = snapshot.compare(kept, trainer)
    return _Found(path, kept, [f"{path} cannot be resumed: {one}" for one in refused], told)


def _load(trainer: Trainer, folder: Path) -> None:
    planner = LoadPlanner(state.entries(trainer))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load({}, checkpoint_id=folder, planner=planner, no_dist=trainer.mesh.world == 1)
    except CheckpointException as error:
        rank, (why, _trace) = min(error.failures.items())
        raise ConfigError([f"{folder} cannot be resumed: rank {rank}: {line_of(why)}"]) from error
    trainer.built.buckets.updated()
