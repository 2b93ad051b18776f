"""The folder of a run's checkpoints, and what stands in it when the machine dies at any moment.

In: a folder that all ranks see. Out: names of whole checkpoints, newest first. No torch here.

    latest               names of the whole ones, newest first, one a line; moved into place at once
    step-00000020/       a whole checkpoint: trainer.json, .metadata, __0_0.distcp ...
    .part-step-00000030/ half-written, or half-deleted: never read, removed at the next start

A checkpoint counts from the moment that `latest` names it, and it is whole on the disk before:
files and folders are synced first (fsync(2), rename(2)). What `latest` does not name is not read.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"step-\d{8,19}", re.ASCII)
_MOST_BYTES = 1 << 16
"""Of `latest`: thousands of names."""
_PART = ".part-"


class Shelf:
    """One folder; one rank alone changes it, save for the files inside a half-written one."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.kept: list[str] = []
        """Names of whole checkpoints of this run, newest first."""

    def known(self) -> list[str]:
        """What `latest` names and is there, newest first. Raises OSError."""
        try:
            with (self.folder / "latest").open("rb") as file:
                text = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return []
        names = text.decode("ascii", "replace").splitlines()
        return [one for one in names if _NAME.fullmatch(one) and (self.folder / one).is_dir()]

    def clean(self) -> None:
        """Make the folder, and remove what an earlier run left half-done in it. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"{_PART}*"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()

    def part(self, step: int) -> Path:
        """Where the checkpoint of `step` is written."""
        return self.folder / f"{_PART}{name(step)}"

    def publish(self, step: int) -> None:
        """The one of `step` is written: let it count. Raises OSError."""
        new = name(step)
        sync(self.part(step))
        aside = self.folder / f"{_PART}old-{new}"
        if (self.folder / new).exists():  # of a run that was given up at a later step
            (self.folder / new).rename(aside)
        self.part(step).rename(self.folder / new)
        names = [new, *(one for one in self.kept if one != new)]
        kept, gone = names[: self.keep], names[self.keep :]
        try:
            write(self.folder / "latest", "".join(f"{one}\n" for one in kept))
        except OSError:  # not named, so not there
            (self.folder / new).rename(self.part(step))
            raise
        self.kept = kept
        for one in gone:
            if (self.folder / one).exists():
                (self.folder / one).rename(self.folder / f"{_PART}{one}")
        for left in (aside, *(self.folder / f"{_PART}{one}" for one in gone)):
            if left.exists():
                shutil.rmtree(left)

    def drop(self, step: int) -> None:
        """The one of `step` failed: give its space back. Raises OSError."""
        if self.part(step).exists():
            shutil.rmtree(self.part(step))


def name(step: int) -> str:
    """Of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def write(path: Path, text: str) -> None:
    """Replace a small file: whoever reads it, whenever, sees the old text or the new."""
    part = path.with_name(f"{_PART}{path.name}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
