"""One row of `ranks` for each process, out of what several files say of it.

In: readings whose rows name ranks: a dump, a log, a launcher's summary. Out: the same, with the
rows of one process joined into the first: null columns filled, first and last sight widened. Two
pids or attempts of one rank stay two rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.collected import Reading

_TELLING = ("pid", "attempt")


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        a.get(name) is None or b.get(name) is None or a[name] == b[name] for name in _TELLING
    )


def _join(into: dict[str, Any], row: dict[str, Any]) -> None:
    for name, value in row.items():
        if value is None:
            continue
        old = into.get(name)
        if old is None:
            into[name] = value
        elif name == "first_seen_ns":
            into[name] = min(old, value)
        elif name == "last_seen_ns":
            into[name] = max(old, value)


def settle(readings: Sequence[Reading]) -> None:
    """Change `readings` in place."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for reading in readings:
        kept = []
        for row in reading.rows.get("ranks", []):
            known = rows.setdefault(row["rank"], [])
            fitting = next((k for k in known if _same(k, row)), None)
            if fitting is None:
                known.append(row)
                kept.append(row)
            else:
                _join(fitting, row)
        if "ranks" in reading.rows:
            reading.rows["ranks"] = kept
    _stacks(readings, rows)


def _stacks(readings: Sequence[Reading], rows: dict[int, list[dict[str, Any]]]) -> None:
    """Ranks of stack dumps that name only a pid, and of which one rank has that pid."""
    owners: dict[int, set[int]] = {}
    for rank, some in rows.items():
        for row in some:
            if row.get("pid") is not None:
                owners.setdefault(row["pid"], set()).add(rank)
    for reading in readings:
        for row in reading.rows.get("stacks", []):
            found = owners.get(row.get("pid") or -1, set())
            if row.get("rank") is None and len(found) == 1:
                row["rank"] = next(iter(found))
