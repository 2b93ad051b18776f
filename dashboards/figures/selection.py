"""What a page shows: which ranks, which steps; and the tables cut down to that, as arrays.

In: a Collected and a Selection. Out: numpy arrays of intervals, in integer ns, and rank lists.
Null times stay visible as such: an interval without an end runs until the last time seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks.columns import codes

if TYPE_CHECKING:
    import numpy.typing as npt

    from collectors.collected import Collected

    Ints = npt.NDArray[np.int64]

_TIMES = {
    "steps": ("start_ns", "end_ns"),
    "phases": ("start_ns", "end_ns"),
    "collectives": ("issue_ns", "start_ns", "end_ns"),
}


@dataclass(frozen=True)
class Selection:
    """Ranks (None: all) and steps from `first` to `last`, both included (None: open)."""

    ranks: tuple[int, ...] | None = None
    first: int | None = None
    last: int | None = None

    @property
    def stepped(self) -> bool:
        """Whether it limits the steps."""
        return self.first is not None or self.last is not None

    def keep(self, rank: Ints, step: Ints) -> npt.NDArray[np.bool_]:
        """Which rows are selected; a row without a step goes when steps are limited."""
        kept = rank >= 0
        if self.ranks is not None:
            kept &= np.isin(rank, np.asarray(self.ranks, dtype=np.int64))
        if self.first is not None:
            kept &= step >= self.first
        if self.last is not None:
            kept &= (step >= 0) & (step <= self.last)
        return kept


@dataclass(frozen=True)
class Intervals:
    """Rows of one table as arrays of equal length, sorted by (rank, start)."""

    row: Ints
    """Row number in the table."""
    rank: Ints
    step: Ints
    """-1 where the source has none."""
    start: Ints
    end: Ints
    open: npt.NDArray[np.bool_]
    """True where the end is not known; `end` is then the end of the process or of the job."""

    def __len__(self) -> int:
        return len(self.row)

    def where(self, mask: npt.NDArray[np.bool_]) -> Intervals:
        """The rows of `mask`."""
        return Intervals(
            self.row[mask],
            self.rank[mask],
            self.step[mask],
            self.start[mask],
            self.end[mask],
            self.open[mask],
        )


def ranks_of(collected: Collected) -> list[int]:
    """Every rank that any table speaks of, or that the world size implies, in order."""
    seen: set[int] = set(range(collected.world_size or 0))
    for name in ("ranks", "steps", "phases", "collectives"):
        seen.update(int(r) for r in np.unique(collected.ints(name, "rank")) if r >= 0)
    return sorted(seen)


def time_span(collected: Collected) -> tuple[int, int] | None:
    """First and last time of steps, phases and collectives in ns; None when there is none.

    What never ended lasts as long as the job did: until its end, or the last sample of its host. A
    stopped job writes nothing, and its last record would make the stop look like no time at all.
    """
    known = [
        values[values >= 0]
        for name, columns in _TIMES.items()
        for values in (collected.ints(name, column) for column in columns)
    ]
    joined = np.concatenate(known)
    if joined.size == 0:
        return None
    last = int(joined.max())
    if any(unended(collected, name).any() for name in _TIMES):
        ended = collected.run.get("ended_ns")
        sampled = collected.ints("hosts", "time_ns")
        if isinstance(ended, int):
            last = max(last, ended)
        elif sampled.size:
            last = max(last, int(sampled.max()))
    return int(joined.min()), last


def unended(collected: Collected, name: str) -> npt.NDArray[np.bool_]:
    """Rows of `name` that began and have no end."""
    began = collected.ints(name, _TIMES[name][0]) >= 0
    missing: npt.NDArray[np.bool_] = began & (collected.ints(name, "end_ns") < 0)
    return missing


def _death(collected: Collected, rank: Ints, last: int) -> Ints:
    """When the process of each of `rank` was seen to have ended; `last` where it was not."""
    ends = {
        int(r): int(t)
        for r, t in zip(
            collected.ints("ranks", "rank"), collected.ints("ranks", "ended_ns"), strict=True
        )
        if t >= 0
    }
    return np.asarray([min(last, ends.get(int(r), last)) for r in rank], dtype=np.int64)


def step_span(collected: Collected) -> tuple[int, int] | None:
    """First and last step number; None when there is none."""
    numbers = np.concatenate(
        [collected.ints(n, "step") for n in ("steps", "phases", "collectives")]
    )
    numbers = numbers[numbers >= 0]
    return (int(numbers.min()), int(numbers.max())) if numbers.size else None


def intervals(collected: Collected, name: str, chosen: Selection) -> Intervals:
    """Selected rows of "steps", "phases" or "collectives" that have a start."""
    rank, step = collected.ints(name, "rank"), collected.ints(name, "step")
    end = collected.ints(name, "end_ns")
    start = collected.ints(name, "start_ns")
    if name == "collectives":
        issued = collected.ints(name, "issue_ns")
        start = np.where(start >= 0, start, issued)
    span = time_span(collected)
    unknown = end < 0
    end = end.copy()
    end[unknown] = _death(collected, rank[unknown], span[1] if span else 0)
    end = np.maximum(end, start)
    kept = chosen.keep(rank, step) & (start >= 0)
    row = np.flatnonzero(kept)
    if not _sorted(rank[row], start[row], end[row]):
        row = row[np.lexsort((-end[row], start[row], rank[row]))]
    return Intervals(row, rank[row], step[row], start[row], end[row], unknown[row])


def _sorted(rank: Ints, start: Ints, end: Ints) -> bool:
    """Whether rows stand by (rank, start, -end) already, as a run directory has them."""
    later, same = start[1:] > start[:-1], start[1:] == start[:-1]
    after = later | (same & (end[1:] <= end[:-1]))
    return bool(((rank[1:] > rank[:-1]) | ((rank[1:] == rank[:-1]) & after)).all())


def kinds(collected: Collected, table: str, column: str, fallback: str) -> tuple[Ints, list[str]]:
    """A text column as numbers into a list of names; null is `fallback`."""
    numbers, names = codes(collected, table, column)
    if (numbers < 0).any():
        numbers = np.where(numbers < 0, len(names), numbers)
        names = [*names, fallback]
    return numbers, names


def axis_of_group(collected: Collected) -> dict[str, str]:
    """Axis by group_id."""
    rows: list[dict[str, Any]] = collected.rows("groups")
    return {r["group_id"]: r["axis"] or "unknown" for r in rows if r["group_id"] is not None}
