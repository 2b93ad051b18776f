"""Loose files to tables: walk, recognise by content, read, settle across files, merge.

In: paths as a user names them (files, folders, run directories, "-" for stdin). Out: Collected.
What is not known is a Source of kind "unknown", never a guess; nothing here raises on bad content.
Files are read in the order of their names, so that the order of arguments decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors.collected import Collected, Reading, Source, merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.readers.artifact import Artifact


def read_paths(paths: Sequence[str], stdin: bytes | None = None) -> Collected:
    """Everything that stands in `paths`; `stdin` is what "-" means."""
    from collectors.readers import combine, files

    found = files.find(paths, stdin)
    readings = [*found.told, *(r for a in found.artifacts for r in read_all(a))]
    settle_all(readings)
    loose = merge(readings)
    if not found.runs:
        return loose
    from collectors import store

    return combine.join([*(store.read_run(run) for run in found.runs), loose])


def read_all(artifact: Artifact) -> list[Reading]:
    """All readings of one file: notes that show a matrix hold other lines as well."""
    from collectors.readers import log, topo_matrix

    first = read_artifact(artifact)
    if first.source.kind != topo_matrix.KIND:
        return [first]
    rest = log.read(artifact)
    return [first, rest] if rest.source.kind == log.KIND else [first]


def read_artifact(artifact: Artifact) -> Reading:
    """What the first reader that knows these bytes makes of them."""
    from collectors.readers.registry import READERS

    if not artifact.head:
        return Reading(Source(artifact.path, "unknown", "none", ("the file is empty",)))
    for reader in READERS:
        if reader.sniff(artifact.head):
            try:
                return reader.read(artifact)
            except OSError as wrong:
                why = f"could not be read: {wrong.strerror or wrong}"
                return Reading(Source(artifact.path, reader.KIND, "none", (why,)))
    return Reading(Source(artifact.path, "unknown", "none", ("no format that is known here",)))


def settle_all(readings: list[Reading]) -> None:
    """What only all files together can tell: groups of dumps, years of logs, rows of stacks."""
    from collectors.readers import fr_settle, processes
    from collectors.readers.flight_recorder import FlightReading
    from collectors.readers.logs import settle as log_settle
    from collectors.readers.logs.reading import LogReading

    fr_settle.settle([r for r in readings if isinstance(r, FlightReading)])
    log_settle.settle([r for r in readings if isinstance(r, LogReading)])
    processes.settle(readings)
    offset = 0
    for reading in readings:
        for row in reading.rows.get("collectives", []):
            if row.get("stack_id") is not None:
                row["stack_id"] += offset
        offset += len(reading.rows.get("stacks", []))
