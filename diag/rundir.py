"""The run directory: its name, and writes that are whole or not there.

Out: a fresh directory, run.json rewritten atomically, lines appended to exits.jsonl.
Raises OSError; the supervisor says it in one line and lets the job run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SCHEMA = "diag.run/1"

_held: list[int] = []
"""Locks on the directories that this process claimed; the kernel lets go of them when it ends."""


def name_of(command: Sequence[str]) -> str:
    """What to call a run: its script, its module, or its program; safe as a file name."""
    for index, word in enumerate(command):
        if word == "-m" and index + 1 < len(command):
            found = command[index + 1].rpartition(".")[2]
            break
        if index and word.endswith(".py"):
            found = Path(word).stem
            break
    else:
        found = Path(command[0]).stem
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in found).strip(".-")
    return safe[:60] or "job"


def make(name: str) -> Path:
    """A new directory `runs/<HHMM>-<name>`, with -2, -3, ... where that is taken."""
    base = Path("runs") / f"{time.strftime('%H%M')}-{name}"
    base.parent.mkdir(exist_ok=True)
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _alive(run: Mapping[str, Any]) -> bool:
    """Whether the run that this run.json tells of may still be written to."""
    if run.get("state") != "running":
        return False
    if run.get("host") != os.uname().nodename:
        return True
    return Path(f"/proc/{run.get('pid')}").exists()


def _hold(path: Path) -> bool:
    """Lock directory `path` for as long as this process lives; False when another one holds it.

    A lock needs no file of its own, follows a rename and never stays behind. A file system without
    locks (some network mounts) counts as free: there is no telling."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # writable, but not to be listed
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    except OSError:
        os.close(handle)
        return True
    _held.append(handle)
    return True


@contextlib.contextmanager
def _one_at_a_time(parent: Path) -> Iterator[None]:
    """Claims within one folder wait for each other, where it can be read and has locks."""
    try:
        handle = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def claim(path: Path) -> tuple[Path, str | None]:
    """(the directory to use for --run-dir `path`, a sentence when something had to move).

    An earlier run that ended is moved aside to `path.1`, `path.2`, ..., so that nothing is lost and
    a restarted job script works. Beside a run that is still going, or one that has only just
    claimed the same name, a free name is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(path.parent):
        return _claim(path)


def _claim(path: Path) -> tuple[Path, str | None]:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    run: Any = {}
    if (path / "run.json").exists() or (path / "ranks").exists():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            run = json.loads((path / "run.json").read_text("utf-8"))
        going = isinstance(run, dict) and _alive(run)
        if not going:
            path.rename(aside)
            path.mkdir()
            _hold(path)
            return path, f"the earlier run in {path} is now {aside}"
    else:
        path.mkdir(exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(path))
        going = not _hold(path)
    if not going:
        return path, None
    aside.mkdir()
    _hold(aside)
    return aside, f"{path} belongs to a run that is still going; this one goes to {aside}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` as a whole: a reader sees the old content or the new one."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append one JSON line with a single write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines as a whole."""
    partial = path.with_name(path.name + ".part")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.replace(path)
