"""What any source becomes: tables, where they came from, and what could not be read.

A reader returns a `Reading`; `merge` joins the readings of a pile of files, or of a run directory,
into one `Collected`, which is all that metrics, rules, report and pages ever see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from collectors import schema

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    import pyarrow as pa

    from collectors.topology.graph import Topology
    from collectors.topology.plan import Plan


@dataclass(frozen=True)
class Source:
    """One file (or live source) and how far it was read."""

    path: str
    """As the user named it."""
    kind: str
    """Format, such as "flight-recorder" or "log"; "unknown" when not recognised."""
    read: str
    """"all", "part" or "none"."""
    problems: tuple[str, ...] = ()
    """One sentence each: what was not read, and why."""


@dataclass
class Reading:
    """What one reader took from one file. Rows are mappings in the words of `schema`."""

    source: Source
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    world_size: int | None = None
    topologies: list[Topology] = field(default_factory=list)
    plan: Plan | None = None

    def add(self, table: str, **row: Any) -> None:
        """Append one row to `table`."""
        self.rows.setdefault(table, []).append(row)


@dataclass
class Collected:
    """All tables (each present, perhaps empty) and their provenance."""

    tables: dict[str, pa.Table]
    sources: list[Source]
    world_size: int | None = None
    topologies: list[Topology] = field(default_factory=list)
    plan: Plan | None = None
    run: dict[str, Any] = field(default_factory=dict)
    """Contents of run.json when the source is a run directory, else empty."""

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Table `name` as a list of mappings; for small tables and for rules that read few rows."""
        rows: list[dict[str, Any]] = self.tables[name].to_pylist()
        return rows

    def ints(self, name: str, column: str, null: int = -1) -> npt.NDArray[np.int64]:
        """An integer column; nulls become `null` (an int64 nanosecond never passes a float)."""
        import pyarrow.compute as pc

        filled = pc.fill_null(self.tables[name].column(column), null)
        values: npt.NDArray[np.int64] = filled.to_numpy().astype(np.int64, copy=False)
        return values

    def floats(self, name: str, column: str) -> npt.NDArray[np.float64]:
        """A float column; nulls become NaN."""
        values = self.tables[name].column(column).to_numpy(zero_copy_only=False)
        return np.asarray(values, dtype=np.float64)

    def texts(self, name: str, column: str) -> list[str | None]:
        """A text column as a list."""
        values: list[str | None] = self.tables[name].column(column).to_pylist()
        return values


def empty() -> Collected:
    """Collected with every table present and empty."""
    return Collected({name: schema.table(name) for name in schema.TABLES}, [])


def merge(readings: Iterable[Reading]) -> Collected:
    """One Collected out of many readings; the order of readings decides nothing but row order."""
    out = empty()
    rows: dict[str, list[dict[str, Any]]] = {}
    for reading in readings:
        out.sources.append(reading.source)
        out.topologies.extend(reading.topologies)
        out.plan = out.plan or reading.plan
        if reading.world_size is not None:
            out.world_size = max(out.world_size or 0, reading.world_size)
        for name, some in reading.rows.items():
            rows.setdefault(name, []).extend(some)
    for name, some in rows.items():
        out.tables[name] = schema.table(name, some)
    return out
