"""Flight logs of a run's ranks become the tables ranks, groups, steps, phases, collectives, memory.

In: the logs as `agent.flight` reads them. Out: arrow tables; no Python object a record, since a run
has millions. What a rank did not know is null; nothing is guessed here but the axis that a group's
description states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from collectors import c10d, schema
from collectors.agent import flight

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from collectors.agent.flight import Group, Log


def _known(values: npt.NDArray[Any], null: int = 0) -> pa.Array:
    """Integers in which `null` stands for "not known"."""
    wide = values.astype(np.int64)
    return pa.array(wide, mask=wide == null)


def _words(ids: npt.NDArray[Any], names: dict[int, str]) -> pa.Array:
    """Ids to texts; id 0 and unknown ids are null."""
    most = max(names, default=0)
    texts: list[str | None] = [names.get(i) for i in range(most + 1)]
    texts[0] = None
    safe = np.where(ids <= most, ids, 0).astype(np.int64)
    return pa.array(texts, type=pa.string()).take(pa.array(safe))


def _constant(value: Any, length: int, kind: pa.DataType) -> pa.Array:
    return pa.array([value], type=kind).take(pa.array(np.zeros(length, dtype=np.int64)))


def source_name(log: Log) -> str:
    """How evidence names this log: its directory within the run."""
    return f"ranks/{log.directory.name}"


def group_key(group: Group) -> str:
    """Equal on all members of a group, different between groups."""
    return f"{group.name}[{c10d.ranks_text(group.ranks)}]"


def groups_table(logs: Iterable[Log]) -> pa.Table:
    """One row a group, whoever saw it; annotations of any member name its axis."""
    axes: dict[str, str] = {}
    found: dict[str, Group] = {}
    for log in logs:
        for group in log.groups.values():
            found.setdefault(group_key(group), group)
            if group.name in log.axes:
                axes[group_key(group)] = log.axes[group.name]
    rows = [
        {
            "group_id": key,
            "name": group.desc or group.name,
            "axis": axes.get(key) or c10d.axis_word(group.desc),
            "ranks": list(group.ranks),
            "backend": group.backend,
        }
        for key, group in sorted(found.items())
    ]
    return schema.table("groups", rows)


def steps_table(log: Log) -> pa.Table:
    """Steps with the numbers that the program gave for them."""
    rows = log.records[log.records["kind"] == flight.STEP]
    rank = int(log.meta["rank"])
    columns: dict[str, Any] = {
        "rank": _constant(rank, len(rows), pa.int64()),
        "step": rows["step"].astype(np.int64),
        "start_ns": rows["start"],
        "end_ns": _known(rows["end"]),
    }
    numbers = log.records[log.records["kind"] == flight.NUMBER]
    place = {int(step): i for i, step in enumerate(rows["step"])}
    columns["cpu_ns"], columns["queued_ns"] = _known(rows["a"], -1), _known(rows["b"], -1)
    for name in ("tokens", "loss", "grad_norm"):
        ids = [i for i, text in log.names.items() if text == name]
        values = np.full(len(rows), np.nan)
        for one in numbers[np.isin(numbers["name"], ids)]:
            at = place.get(int(one["step"]))
            if at is not None:
                values[at] = np.int64(one["a"]).view(np.float64)
        columns[name] = pa.array(values, mask=np.isnan(values))
    return schema.table_from_columns("steps", columns, len(rows))


def phases_table(log: Log) -> pa.Table:
    """Phases, open ones with a null end."""
    rows = log.records[log.records["kind"] == flight.PHASE]
    return schema.table_from_columns(
        "phases",
        {
            "rank": _constant(int(log.meta["rank"]), len(rows), pa.int64()),
            "step": _known(rows["step"], -1),
            "microbatch": _known(rows["microbatch"], -1),
            "stage": _known(rows["stage"], -1),
            "phase": _words(rows["name"], log.names),
            "start_ns": rows["start"],
            "end_ns": _known(rows["end"]),
            "device_ns": _known(rows["wait"]),
        },
        len(rows),
    )


def _step_at(log: Log, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The step within which each time lies; -1 before the first. A guessed step is closed late
    (when the next one begins), so the time tells better than what was current."""
    steps = log.records[log.records["kind"] == flight.STEP]
    if not len(steps):
        return np.full(len(times), -1, dtype=np.int64)
    place = np.searchsorted(steps["start"], times, side="right") - 1
    return np.where(place >= 0, steps["step"][np.maximum(place, 0)], -1).astype(np.int64)


def collectives_table(log: Log) -> pa.Table:
    """The ledger of one rank."""
    rows = log.records[log.records["kind"] == flight.COLLECTIVE]
    count = len(rows)
    keys = {i: group_key(g) for i, g in log.groups.items()}
    op = _words(rows["name"], log.names)
    states = pa.array(["issued", "completed", "failed"])
    serial = pc.cast(pa.array(rows["serial"].astype(np.int64)), pa.string())
    return schema.table_from_columns(
        "collectives",
        {
            "rank": _constant(int(log.meta["rank"]), count, pa.int64()),
            "group_id": _words(rows["group"], keys),
            "seq": rows["seq"],
            "op": op,
            "dtype": _words(rows["dtype"], log.names),
            "shape": _words(rows["shape"], log.names),
            "bytes_in": rows["a"],
            "bytes_out": rows["b"],
            "peer": _known(rows["peer"], -1),
            "issue_ns": rows["start"],
            "start_ns": _known(rows["begin"]),
            "end_ns": _known(rows["end"]),
            "wait_ns": _known(rows["wait"]),
            "state": states.take(pa.array(np.minimum(rows["state"], 2).astype(np.int64))),
            "step": _known(_step_at(log, rows["start"]), -1),
            "p2p": pc.is_in(op, value_set=pa.array(["send", "recv"])),
            "source": _constant(source_name(log), count, pa.string()),
            "locator": pc.binary_join_element_wise("record", serial, " "),
        },
        count,
    )


def memory_table(log: Log) -> pa.Table:
    """Memory samples of one rank."""
    rows = log.records[log.records["kind"] == flight.MEMORY]
    return schema.table_from_columns(
        "memory",
        {
            "rank": _constant(int(log.meta["rank"]), len(rows), pa.int64()),
            "step": _known(rows["step"], -1),
            "time_ns": rows["start"],
            "allocated": _known(rows["a"], -1),
            "reserved": _known(rows["b"], -1),
            "peak": _known(rows["seq"], -1),
            "rss": _known(rows["begin"]),
        },
        len(rows),
    )


def rank_row(log: Log) -> dict[str, Any]:
    """What the log itself says of its rank; how it ended is known elsewhere."""
    meta = log.meta
    row: dict[str, Any] = {
        "rank": meta["rank"],
        "attempt": meta.get("attempt", 0),
        "local_rank": meta.get("local_rank"),
        "host": meta.get("host"),
        "pid": meta.get("pid"),
        "device": log.device,
        "closed": log.closed,
        "dropped": log.dropped,
        **{axis: at for axis, at in log.mesh.items() if axis in ("pp", "dp", "cp", "tp", "ep")},
    }
    if len(log.records):
        row["first_seen_ns"] = int(log.records["start"][0])
        row["last_seen_ns"] = int(max(log.records["start"].max(), log.records["end"].max()))
    return row


def tables(logs: list[Log]) -> dict[str, pa.Table]:
    """groups, steps, phases, collectives and memory of all ranks, ordered by rank."""
    makers = {
        "steps": steps_table,
        "phases": phases_table,
        "collectives": collectives_table,
        "memory": memory_table,
    }
    out = {"groups": groups_table(logs)}
    for name, make in makers.items():
        parts = [make(log) for log in logs] or [schema.table(name)]
        out[name] = pa.concat_tables(parts)
    return out
