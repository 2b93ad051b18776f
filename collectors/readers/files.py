"""Which files a user means: walks folders, takes stdin, knows run directories.

In: paths as typed. Out: artifacts sorted by name (those in archives too), run directories, and a
refusal for each path that is not there. Symbolic links are not followed out of a folder; the walk
is bounded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from collectors.collected import Reading, Source
from collectors.readers import archives
from collectors.readers.artifact import Artifact, from_bytes, from_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FILES = 20_000
"""More files under one argument are not read."""
_RUN_BYTES = 1 << 20


@dataclass
class Found:
    """What the arguments mean."""

    artifacts: list[Artifact] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    told: list[Reading] = field(default_factory=list)
    """What is to be said of paths that are no artifact: refusals, and archives."""


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory of ours: its run.json says so."""
    try:
        with (path / "run.json").open("rb") as stream:
            value = json.loads(stream.read(_RUN_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and str(value.get("schema", "")).startswith("diag.run/")


def _refuse(found: Found, path: str, why: str) -> None:
    found.told.append(Reading(Source(path, "unknown", "none", (why,))))


def _add(found: Found, artifact: Artifact) -> None:
    """A file, or the files in an archive. OSError where there is no room to unpack."""
    if not archives.sniff(artifact.head):
        found.artifacts.append(artifact)
        return
    problems: list[str] = []
    found.artifacts += archives.expand(artifact, problems)
    read = "part" if problems else "all"
    found.told.append(Reading(Source(artifact.path, archives.KIND, read, tuple(problems))))


def _under(top: Path, found: Found) -> Iterator[Path]:
    """Regular files under `top` in the order of their names; run directories go into `found`."""
    count = 0
    for folder, folders, names in os.walk(top, followlinks=False):
        here = Path(folder)
        if is_run(here):
            found.runs.append(here)
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not (here / f).is_symlink())
        for name in sorted(names):
            path = here / name
            if path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > FILES:
                _refuse(found, str(top), f"more than {FILES} files; the rest was not read")
                return
            yield path


def find(paths: Sequence[str], stdin: bytes | None = None) -> Found:
    """The artifacts and run directories that `paths` mean, each file once."""
    found = Found()
    seen: set[Path] = set()

    def take(path: Path, name: str) -> None:
        real = path.resolve()
        if real in seen:
            return
        seen.add(real)
        try:
            _add(found, from_file(path, name))
        except OSError as wrong:
            _refuse(found, name, f"cannot be opened: {wrong.strerror or wrong}")

    for text in sorted(set(paths)):
        if text == "-":
            _add(found, from_bytes(stdin or b""))
            continue
        path = Path(text)
        if path.is_dir():
            for file in _under(path, found):
                take(file, str(file))
        elif path.is_file():
            take(path, text)
        else:
            _refuse(found, text, "there is no such file or folder")
    found.artifacts.sort(key=lambda a: a.path)
    found.runs = sorted({run.resolve(): run for run in found.runs}.values())
    return found
