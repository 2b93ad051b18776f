"""Makes readings of many Flight Recorder dumps agree: one dump a rank, one key a group.

In: the readings of all dumps of a pile. Out: the same readings, changed: a second copy of a rank's
dump is set aside, a group whose members a dump does not state (gloo never does, older versions do
not) gets the members that other dumps state or, failing that, the ranks that use its name.
The order of the dumps decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from collectors.c10d import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.readers.flight_recorder import FlightReading


def settle(readings: Sequence[FlightReading]) -> None:
    """Change `readings` in place so that they can be merged."""
    read = [r for r in readings if r.source.read != "none"]
    kept = _one_a_rank(read)
    _unify_groups(kept)
    _merge_groups(kept)
    _versions(kept)


def _say(reading: FlightReading, problem: str) -> None:
    reading.source = replace(reading.source, problems=(*reading.source.problems, problem))


def _set_aside(reading: FlightReading, why: str) -> None:
    reading.rows.clear()
    reading.names = {}
    reading.world_size = None
    _say(reading, why)


def _one_a_rank(readings: list[FlightReading]) -> list[FlightReading]:
    """Keep the latest dump of each rank; a pickle before its JSON twin, for its frames."""

    def rank_order(one: FlightReading) -> tuple[Any, ...]:
        whole = one.source.read == "all"
        return (one.last_ns, len(one.signature), whole, one.encoding == "pickle", one.source.path)

    by_rank: dict[int, list[FlightReading]] = {}
    kept = [r for r in readings if r.rank is None]
    for reading in readings:
        if reading.rank is not None:
            by_rank.setdefault(reading.rank, []).append(reading)
    for rank, some in by_rank.items():
        best = max(some, key=rank_order)
        kept.append(best)
        for other in some:
            if other is best:
                continue
            same = other.signature == best.signature
            what = "the same dump as" if same else f"an earlier dump of rank {rank} than"
            _set_aside(other, f"{what} {best.source.path}; set aside")
    return sorted(kept, key=lambda r: (r.rank is None, r.rank, r.source.path))


def _known(readings: list[FlightReading]) -> dict[str, set[tuple[int, ...]]]:
    """c10d name -> the member lists that dumps state for it."""
    out: dict[str, set[tuple[int, ...]]] = {}
    for reading in readings:
        for group in reading.names.values():
            if group.ranks is not None:
                out.setdefault(group.name, set()).add(group.ranks)
    return out


def _users(readings: list[FlightReading]) -> dict[str, set[int]]:
    """c10d name -> ranks whose dumps use it without stating its members."""
    out: dict[str, set[int]] = {}
    for reading in readings:
        for group in reading.names.values():
            if group.ranks is None and reading.rank is not None:
                out.setdefault(group.name, set()).add(reading.rank)
    return out


def _unify_groups(readings: list[FlightReading]) -> None:
    known, users = _known(readings), _users(readings)
    for reading in readings:
        renamed: dict[str, tuple[str, list[int] | None]] = {}
        inferred = []
        for key, group in reading.names.items():
            if group.ranks is not None:
                continue
            fitting = [r for r in known.get(group.name, ()) if reading.rank in r]
            if len(fitting) == 1:
                ranks = list(fitting[0])
            elif reading.rank is None:
                continue
            else:
                ranks = sorted(users[group.name])
                inferred.append(group.name)
            renamed[key] = (f"{group.name}[{ranks_text(ranks)}]", ranks)
        if inferred:
            _say(
                reading,
                "the dump does not state the members of group"
                f"{'s' if len(inferred) > 1 else ''} {', '.join(sorted(inferred)[:8])}; "
                "taken to be the ranks whose dumps use the name",
            )
        _rename(reading, renamed)


def _rename(reading: FlightReading, renamed: dict[str, tuple[str, list[int] | None]]) -> None:
    for row in reading.rows.get("collectives", []):
        if row["group_id"] in renamed:
            row["group_id"] = renamed[row["group_id"]][0]
    for row in reading.rows.get("groups", []):
        if row["group_id"] in renamed:
            row["group_id"], row["ranks"] = renamed[row["group_id"]]
    for row in reading.rows.get("log_events", []):
        for old, (new, _) in renamed.items():
            row["fields"] = row["fields"].replace(f'"group_id": "{old}"', f'"group_id": "{new}"')


def _merge_groups(readings: list[FlightReading]) -> None:
    """Leave one row of each group, in the first reading that has it, with all that is known."""
    first: dict[str, dict[str, Any]] = {}
    for reading in readings:
        rows = []
        for row in reading.rows.get("groups", []):
            seen = first.setdefault(row["group_id"], row)
            if seen is row:
                rows.append(row)
                continue
            for column, value in row.items():
                if seen.get(column) in (None, "unknown"):
                    seen[column] = value
        if "groups" in reading.rows:
            reading.rows["groups"] = rows


def _versions(readings: list[FlightReading]) -> None:
    counts = Counter(r.version for r in readings)
    if len(counts) < 2:
        return
    usual = max(counts, key=lambda v: (counts[v], v))
    for reading in readings:
        if reading.version != usual:
            _say(reading, f"version {reading.version or 'none'}, while most dumps are {usual}")
