"""The tables: names, dtypes, units, one sentence a column.

Every source (a job under watch, a run directory, loose files) becomes these tables, so that every
metric, rule and page works for all of them. A column that a source cannot fill is null, never 0.
Times are integer nanoseconds since the epoch on one clock for all ranks; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa

SCHEMA_VERSION = 1
"""Raised whenever a column changes its meaning or goes away."""


@dataclass(frozen=True)
class Column:
    """One column: its name, arrow dtype as text, unit ("" when it has none) and meaning."""

    name: str
    dtype: str
    unit: str
    doc: str


def _c(name: str, dtype: str, doc: str, unit: str = "") -> Column:
    return Column(name, dtype, unit, doc)


_RANK = _c("rank", "int64", "global rank; null when a source does not say")
_STEP = _c("step", "int64", "training step, from 0")

TABLES: Mapping[str, tuple[Column, ...]] = {
    "ranks": (
        _RANK,
        _c("attempt", "int64", "restart attempt of the launcher, from 0"),
        _c("local_rank", "int64", "rank within its host"),
        _c("host", "string", "host name"),
        _c("pid", "int64", "process id on its host"),
        _c("device", "string", "cpu, cuda:N, ..."),
        _c("pp", "int64", "coordinate on the pipeline axis"),
        _c("dp", "int64", "coordinate on the data axis"),
        _c("cp", "int64", "coordinate on the context axis"),
        _c("tp", "int64", "coordinate on the tensor axis"),
        _c("ep", "int64", "coordinate on the expert axis"),
        _c("exit_code", "int64", "exit code when it ended by itself"),
        _c("signal", "int64", "number of the signal that ended it"),
        _c("ended_ns", "int64", "when its process was seen to have ended", "ns"),
        _c("first_seen_ns", "int64", "first record of this rank", "ns"),
        _c("last_seen_ns", "int64", "last record of this rank", "ns"),
        _c("exception", "string", "type and message of the uncaught exception"),
        _c("exception_ns", "int64", "when it was raised to the top", "ns"),
        _c("traceback", "string", "its traceback, as Python prints it"),
        _c("closed", "bool", "whether its log was closed by a regular interpreter exit"),
        _c("dropped", "int64", "records lost because the flight log is bounded"),
    ),
    "groups": (
        _c("group_id", "string", "key: c10d name and ranks, equal on all members"),
        _c("name", "string", "the group's description, or its c10d name"),
        _c("axis", "string", "dp, tp, pp, cp, ep, world, unknown"),
        _c("ranks", "list<int64>", "global ranks of its members, in group order"),
        _c("backend", "string", "gloo, nccl, ..."),
    ),
    "steps": (
        _RANK,
        _STEP,
        _c("start_ns", "int64", "begin of the step", "ns"),
        _c("end_ns", "int64", "end of the step; null while it runs", "ns"),
        _c("tokens", "float64", "tokens of the whole step over all ranks"),
        _c("loss", "float64", "loss of the whole step"),
        _c("grad_norm", "float64", "global gradient norm before clipping"),
        _c("cpu_ns", "int64", "time that the training thread ran on a core", "ns"),
        _c("queued_ns", "int64", "time that it could run but waited for a core", "ns"),
    ),
    "phases": (
        _RANK,
        _STEP,
        _c("microbatch", "int64", "microbatch within the step"),
        _c("stage", "int64", "pipeline stage"),
        _c("phase", "string", "one of collectors.annotate.PHASES"),
        _c("start_ns", "int64", "begin on the host", "ns"),
        _c("end_ns", "int64", "end on the host; null while it runs", "ns"),
        _c("device_ns", "int64", "time on the device, where it was measured", "ns"),
    ),
    "collectives": (
        _RANK,
        _c("group_id", "string", "key into groups"),
        _c("seq", "int64", "number of the operation within its group; p2p counted per peer"),
        _c("op", "string", "all_reduce, all_gather, send, ... (lower case, c10d words)"),
        _c("dtype", "string", "float32, bfloat16, ..."),
        _c("shape", "string", "shape of the first tensor and how many tensors, as text"),
        _c("bytes_in", "int64", "bytes this rank hands in", "B"),
        _c("bytes_out", "int64", "bytes this rank receives", "B"),
        _c("peer", "int64", "global rank of the other side (p2p) or of the root"),
        _c("issue_ns", "int64", "when the host issued it", "ns"),
        _c("start_ns", "int64", "when it began on the device or in the backend", "ns"),
        _c("end_ns", "int64", "when it was complete; null while pending", "ns"),
        _c("wait_ns", "int64", "time the host waited for it", "ns"),
        _c("state", "string", "issued, started, completed, failed"),
        _STEP,
        _c("p2p", "bool", "whether it is a send or receive"),
        _c("stack_id", "int64", "row of `stacks` with the issuing frames"),
        _c("source", "string", "file that says so"),
        _c("locator", "string", "place in that file"),
    ),
    "memory": (
        _RANK,
        _STEP,
        _c("phase", "string", "phase at the sample"),
        _c("time_ns", "int64", "when", "ns"),
        _c("allocated", "int64", "held by tensors", "B"),
        _c("reserved", "int64", "held by the allocator", "B"),
        _c("peak", "int64", "highest `allocated` so far", "B"),
        _c("rss", "int64", "resident set of the process", "B"),
        _c("parameter", "int64", "of parameters", "B"),
        _c("gradient", "int64", "of gradients", "B"),
        _c("optimizer", "int64", "of optimizer states", "B"),
        _c("activation", "int64", "of activations", "B"),
        _c("communication", "int64", "of communication buffers", "B"),
        _c("other", "int64", "what is left", "B"),
    ),
    "hosts": (
        _c("host", "string", "host name"),
        _c("time_ns", "int64", "when", "ns"),
        _c("cpu", "float64", "busy share of all cores, 0 to 1"),
        _c("cores", "int64", "cores the job may use"),
        _c("memory_used", "int64", "used by all processes", "B"),
        _c("memory_total", "int64", "installed, or the cgroup's limit where it is lower", "B"),
        _c("oom_kills", "int64", "memory kills counted by the cgroup since its start"),
        _c("disk_free", "int64", "free on the run directory's file system", "B"),
    ),
    "devices": (
        _c("host", "string", "host name"),
        _c("device", "int64", "index of the GPU on its host"),
        _c("time_ns", "int64", "when", "ns"),
        _c("utilisation", "float64", "share of time a kernel ran, 0 to 1"),
        _c("memory_used", "int64", "used by all processes", "B"),
        _c("memory_total", "int64", "installed", "B"),
        _c("power", "float64", "drawn", "W"),
        _c("temperature", "float64", "of the GPU", "degC"),
        _c("sm_clock", "float64", "streaming multiprocessors", "MHz"),
        _c("throttle", "string", "reasons that hold the clock down, joined by a comma"),
    ),
    "links": (
        _c("host", "string", "host name"),
        _c("a", "string", "one end"),
        _c("b", "string", "other end"),
        _c("kind", "string", "nvlink, pcie-switch, host-bridge, node, socket, network, ..."),
        _c("count", "int64", "parallel links"),
        _c("bandwidth", "float64", "one direction, all links together", "B/s"),
        _c("state", "string", "as the source says it"),
    ),
    "log_events": (
        _c("time_ns", "int64", "when; null when the line has no time", "ns"),
        _RANK,
        _c("host", "string", "host name"),
        _c("source", "string", "file"),
        _c("locator", "string", 'place in it, such as "line 812"'),
        _c("kind", "string", "family.kind of the recognised line"),
        _c("fields", "string", "what was read from it, as a JSON object"),
        _c("quote", "string", "the line itself, cut to 500 characters"),
    ),
    "measurements": (
        _c("source", "string", "file"),
        _c("locator", "string", "place in it, such as line 12"),
        _c("rank", "int64", "rank that wrote the line; null when nothing before it says"),
        _c("kind", "string", "values, heading, title, checked (a statement), code (of source)"),
        _c("fields", "string", "JSON: context {key: text}, values [[label, [text], rank]], head"),
        _c("text", "string", "the line without what loggers put before it"),
        _c("quote", "string", "the line as it stands, cut"),
    ),
    "stacks": (
        _c("look", "int64", "which look of a capture, from 0: two looks tell stuck from slow"),
        _c("time_ns", "int64", "when it was taken", "ns"),
        _RANK,
        _c("pid", "int64", "process id"),
        _c("thread", "string", "name of the thread"),
        _c("main", "bool", "whether it is the main thread"),
        _c("frames", "list<string>", 'innermost first, as "function (file:line)"'),
        _c("state", "string", "active, idle, gil; or the state letter of /proc"),
        _c("cpu_share", "float64", "cores its process used between the looks of its capture"),
        _c("source", "string", "file"),
        _c("locator", "string", "place in it"),
    ),
}


@cache
def arrow_schema(name: str) -> pa.Schema:
    """The arrow schema of table `name`; KeyError when there is none."""
    import pyarrow as pa

    plain = {
        "int64": pa.int64(),
        "float64": pa.float64(),
        "string": pa.string(),
        "bool": pa.bool_(),
        "list<int64>": pa.list_(pa.int64()),
        "list<string>": pa.list_(pa.string()),
    }
    return pa.schema([pa.field(c.name, plain[c.dtype]) for c in TABLES[name]])


def table(name: str, rows: Iterable[Mapping[str, Any]] = ()) -> pa.Table:
    """A table of `rows`; columns a row lacks are null, keys that are no column raise KeyError."""
    import pyarrow as pa

    schema = arrow_schema(name)
    known = set(schema.names)
    listed = list(rows)
    for row in listed:
        if not known.issuperset(row):
            raise KeyError(f"table {name} has no column {sorted(set(row) - known)}")
    return pa.Table.from_pylist(listed, schema=schema)


def table_from_columns(name: str, columns: Mapping[str, Any], length: int) -> pa.Table:
    """A table from arrays (numpy, arrow or lists) of `length`; absent columns are null."""
    import pyarrow as pa

    schema = arrow_schema(name)
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise KeyError(f"table {name} has no column {sorted(unknown)}")
    arrays = [
        pa.array(columns[f.name], type=f.type, from_pandas=True)
        if f.name in columns
        else pa.nulls(length, type=f.type)
        for f in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
