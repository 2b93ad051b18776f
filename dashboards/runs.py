"""The runs on show: found by key, read once, read again only when their files changed.

In: paths from the command line. Out: a View of one run: its tables, its report, or the problem
that kept them from being read. A damaged run is a View with a problem, never an exception.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from collectors.collected import Collected, empty

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from playbooks.report.model import Report

_log = logging.getLogger(__name__)
_CONTROL = "control.bin"
"""How far a flight log is: memory-mapped, so that its mtime stands still while its bytes move."""


@dataclass(frozen=True)
class View:
    """One run as the pages see it."""

    key: str
    path: Path
    collected: Collected
    report: Report | None
    problem: str | None
    """One sentence that says why there is no report; None when there is one."""
    version: str
    """Differs whenever the content may differ."""

    @property
    def live(self) -> bool:
        """Whether the job still runs."""
        return bool(self.collected.run.get("state") == "running")

    @property
    def timed(self) -> bool:
        """Whether there is anything with a time in it, to plot."""
        return any(self.collected.tables[n].num_rows for n in ("steps", "phases", "collectives"))

    @property
    def stepped(self) -> bool:
        """Whether there are steps or phases, so that time can be divided."""
        return any(self.collected.tables[n].num_rows for n in ("steps", "phases"))

    @property
    def shape(self) -> str:
        """What decides which parts a page has; the parts are made anew when it changes."""
        return f"{self.timed} {self.stepped} {len(self.collected.topologies)} {self.problem}"

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.collected.run.get("name") or self.key)


def read_path(path: Path) -> Collected:
    """A run directory as such; anything else as a pile of loose artifacts."""
    if any((path / part).exists() for part in ("run.json", "ranks", "tables")):
        from collectors.store import read_run

        return read_run(path)
    from collectors.readers import read_paths

    return read_paths([str(path)])


def judge(collected: Collected) -> Report:
    """The one place from which the dashboard has its words of judgement."""
    from playbooks.engine import diagnose

    return diagnose(collected)


def fingerprint(path: Path) -> str:
    """Changes when a file below `path` is added, removed, or written to."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        try:
            stat = file.stat()
            if file.name == _CONTROL:
                with file.open("rb") as control:
                    digest.update(control.read(64))
        except FileNotFoundError:
            continue  # a live run replaces files; the next look sees the new one
        digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()[:16]


@dataclass
class Runs:
    """All runs, by key, in the order of the command line."""

    paths: Sequence[Path]
    read: Callable[[Path], Collected] = read_path
    judge: Callable[[Collected], Report] = judge
    _keys: dict[str, Path] = field(default_factory=dict, init=False)
    _kept: dict[str, tuple[str, View]] = field(default_factory=dict, init=False)
    _locks: dict[str, threading.Lock] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for path in self.paths:
            name = path.resolve().name or "run"
            key, number = name, 2
            while key in self._keys:
                key, number = f"{name}-{number}", number + 1
            self._keys[key] = path
            self._locks[key] = threading.Lock()

    def keys(self) -> list[str]:
        """Keys of all runs."""
        return list(self._keys)

    def find(self, key: str | None) -> str | None:
        """The key itself when there is such a run, the first run for None, else None."""
        if key is None:
            return next(iter(self._keys), None)
        return key if key in self._keys else None

    def view(self, key: str) -> View:
        """The run `key` (KeyError when there is none), as its files are now."""
        path = self._keys[key]
        with self._locks[key]:
            mark = fingerprint(path)
            if key in self._kept:
                old_mark, old = self._kept[key]
                if old_mark == mark:
                    return old
            view = self._look(key, path, mark)
            self._kept[key] = (mark, view)
            return view

    def _look(self, key: str, path: Path, mark: str) -> View:
        collected, report, problem = empty(), None, None
        # A page must outlive whatever a damaged run does to a reader or a rule: the reader of the
        # page sees the reason, and the log of the server has the traceback.
        try:
            collected = self.read(path)
            report = self.judge(collected)
        except Exception as wrong:  # noqa: BLE001
            _log.warning("%s could not be read", path, exc_info=True)
            first = str(wrong).splitlines()[0] if str(wrong) else "no reason given"
            problem = f"{type(wrong).__name__}: {first}"
        return View(key, path, collected, report, problem, mark)
