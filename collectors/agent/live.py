"""How far each rank of a running job is, without the job's help.

In: a run directory that the job's agents write. Out: one LiveRank a rank and attempt. It only reads
(a few dozen bytes a rank), so it can be asked many times a second, also when a rank is stuck.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .flight import control as read_control

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class LiveRank:
    """A rank as it stands now."""

    rank: int
    attempt: int
    pid: int
    host: str
    records: int
    """Records written so far."""
    last_ns: int
    """Time of the newest record or completion."""
    steps: int
    """Steps completed."""
    step_median_ns: int | None
    """Typical duration of the last steps."""
    closed: bool
    """Whether the process took the regular way out."""
    phase: str | None
    """Innermost open phase."""
    directory: Path


class LiveRanks:
    """Looks at a run directory again and again; remembers what cannot change."""

    def __init__(self, run_dir: Path) -> None:
        self._ranks = run_dir / "ranks"
        self._meta: dict[str, dict[str, Any]] = {}
        self._phases: dict[str, dict[int, str]] = {}

    def poll(self) -> list[LiveRank]:
        """All ranks that have begun to write, in the order of their directories."""
        try:
            directories = sorted(self._ranks.iterdir())
        except OSError:
            return []
        found = (self._look(directory) for directory in directories)
        return [one for one in found if one is not None]

    def _look(self, directory: Path) -> LiveRank | None:
        meta = self._meta.get(directory.name)
        if meta is None:
            try:
                meta = json.loads((directory / "meta.json").read_text())
                int(meta["rank"]), int(meta["pid"]), int(meta["attempt"]), str(meta["host"])
            except (OSError, ValueError, KeyError, TypeError):
                return None  # not written yet, or not ours
            self._meta[directory.name] = meta
        control = read_control(directory)
        if control is None:
            return None
        records, last, steps, _end, typical, phase, closed, _spare = control
        return LiveRank(
            rank=int(meta["rank"]),
            attempt=int(meta["attempt"]),
            pid=int(meta["pid"]),
            host=str(meta["host"]),
            records=records,
            last_ns=last,
            steps=steps,
            step_median_ns=typical or None,
            closed=bool(closed),
            phase=self._phase(directory, phase),
            directory=directory,
        )

    def _phase(self, directory: Path, number: int) -> str | None:
        if not number:
            return None
        known = self._phases.setdefault(directory.name, {})
        if number not in known:
            try:
                for raw in (directory / "names.jsonl").read_bytes().splitlines():
                    line = json.loads(raw)
                    if "n" in line:
                        known[int(line["n"])] = str(line["t"])
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return known.get(number)
