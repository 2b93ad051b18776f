"""Operator traces of straggler studies: a Parquet row for each operator of a sampled step.

In: Parquet with the columns of ByteDance's StragglerAnalysis (dp_rank, stage, rank, step, optype,
start_ts, duration, seq_id, mb_id; seconds since the begin of the step). Out: rows of ranks, groups,
steps, phases (computation) and collectives (the rest), all steps one after the other on one clock,
since the sampled steps tell no time of day. The size of a file is bounded.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from collectors.collected import Reading, Source
from collectors.readers.artifact import TooLargeError

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact

KIND = "operator-trace"
BYTES = 256 << 20
"""A larger file is not read."""
ROWS = 5_000_000
"""More operators than this are not read; compressed columns can claim any number."""
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mb_id")
_PHASES = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer",
           "gc": "other"}  # fmt: skip
_P2P = {"forward-send": ("send", 1), "forward-recv": ("recv", -1),
        "backward-send": ("send", -1), "backward-recv": ("recv", 1)}  # fmt: skip
"""Operation, and where its peer's stage lies."""
_COLLECTIVES = {
    "params-all-gather": ("all_gather", "dp"),
    "grads-reduce-scatter": ("reduce_scatter", "dp"),
    "embedding-grads-all-reduce": ("all_reduce", "ends"),
    "layernorm-grads-all-reduce": ("all_reduce", "tp"),
    "optimizer-clip-main-grad": ("all_reduce", "world"),
}
"""Operation, and who takes part: the stage's replicas, first and last stage, the rank's tp peers
(which these traces do not tell apart), everybody."""


def sniff(head: bytes) -> bool:
    """Parquet."""
    return head[:4] == b"PAR1"


def read(artifact: Artifact) -> Reading:
    """All operators as tables."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    reading = Reading(Source(artifact.path, KIND, "all"))
    try:
        data, broken = artifact.data(BYTES)
        file = pq.ParquetFile(io.BytesIO(data))
        lacks = [c for c in _COLUMNS if c not in file.schema_arrow.names]
        why = broken or (lacks and f"Parquet without the column(s) {', '.join(lacks)}")
        if not why and file.metadata.num_rows > ROWS:
            why = f"more than {ROWS:,} operators"
        if why:
            reading.source = Source(artifact.path, KIND, "none", (str(why),))
            return reading
        rows = file.read(columns=list(_COLUMNS)).to_pylist()
    except (TooLargeError, pa.ArrowException, OSError, ValueError) as wrong:
        reading.source = Source(artifact.path, KIND, "none", (f"not readable: {wrong}"[:200],))
        return reading
    fine = [row for row in rows if _usable(row)]
    _Job(fine).tell(reading, artifact.path)
    if len(fine) < len(rows):
        why = f"{len(rows) - len(fine)} operators without rank, step or time were left out"
        reading.source = Source(artifact.path, KIND, "part", (why,))
    return reading


def _usable(row: dict[str, Any]) -> bool:
    numbers = (row["start_ts"], row["duration"])
    whole = (row["rank"], row["stage"], row["dp_rank"], row["step"], row["seq_id"])
    return (
        all(isinstance(n, float) and 0 <= n < 1e6 for n in numbers)
        and all(isinstance(n, int) and 0 <= n < 1 << 24 for n in whole)
        and isinstance(row["optype"], str)
    )


class _Job:
    """The operators of a job, and what its ranks have to do with each other."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.rank_of = {(r["stage"], r["dp_rank"]): r["rank"] for r in rows}
        self.place_of = {rank: place for place, rank in self.rank_of.items()}
        self.last = max((r["stage"] for r in rows), default=0)
        ends: dict[int, float] = defaultdict(float)
        for r in rows:
            ends[r["step"]] = max(ends[r["step"]], r["start_ts"] + r["duration"])
        self.begin: dict[int, int] = {}
        at = 0
        for step in sorted(ends):
            self.begin[step] = at
            at += round(ends[step] * 1e9) + 1
        self.count: dict[tuple[Any, ...], int] = defaultdict(int)

    def tell(self, reading: Reading, path: str) -> None:
        """Add all rows to `reading`."""
        for rank, (stage, replica) in sorted(self.place_of.items()):
            reading.add("ranks", rank=rank, pp=stage, dp=replica)
        reading.world_size = len(self.place_of) or None
        groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        ends: dict[tuple[int, int], int] = defaultdict(int)
        ordered = sorted(enumerate(self.rows), key=lambda one: (one[1]["step"], one[1]["start_ts"]))
        for number, row in ordered:
            start = self.begin[row["step"]] + round(row["start_ts"] * 1e9)
            times = (start, start + round(row["duration"] * 1e9))
            key = (row["rank"], row["step"])
            ends[key] = max(ends[key], times[1])
            place = {"source": path, "locator": f"row {number}"}
            self._one(reading, row, times, groups, place)
        for (rank, step), end in sorted(ends.items()):
            reading.add("steps", rank=rank, step=step, start_ns=self.begin[step], end_ns=end)
        for name, (axis, members) in sorted(groups.items()):
            reading.add("groups", group_id=name, name=axis, axis=axis, ranks=list(members))

    def _one(
        self,
        reading: Reading,
        row: dict[str, Any],
        times: tuple[int, int],
        groups: dict[str, tuple[str, tuple[int, ...]]],
        place: dict[str, str],
    ) -> None:
        kind, rank, step = row["optype"], row["rank"], row["step"]
        if kind in _PHASES:
            batch = row["mb_id"] if isinstance(row["mb_id"], int) and row["mb_id"] >= 0 else None
            reading.add(
                "phases", rank=rank, step=step, phase=_PHASES[kind], microbatch=batch,
                stage=row["stage"], start_ns=times[0], end_ns=times[1],
                device_ns=times[1] - times[0],
            )  # fmt: skip
            return
        op, axis, members, peer = self._operation(row)
        if len(members) < 2:  # it moves nothing: time of the rank itself
            reading.add("phases", rank=rank, step=step, phase="communication",
                        start_ns=times[0], end_ns=times[1])  # fmt: skip
            return
        name = f"{axis}[{','.join(map(str, members))}]"
        groups[name] = (axis, members)
        key = (name, rank, op if peer is not None else kind, peer)
        reading.add(
            "collectives", rank=rank, group_id=name, seq=self._number(key, kind), op=op,
            step=step, issue_ns=times[0], end_ns=times[1], wait_ns=times[1] - times[0],
            state="completed", p2p=peer is not None, peer=peer, **place,
        )  # fmt: skip

    def _operation(self, row: dict[str, Any]) -> tuple[str, str, tuple[int, ...], int | None]:
        """(operation, axis, members, peer) of a row of communication."""
        kind, stage, replica = row["optype"], row["stage"], row["dp_rank"]
        if kind in _P2P:
            op, towards = _P2P[kind]
            peer = self.rank_of.get((stage + towards, replica))
            both = (row["rank"],) if peer is None else tuple(sorted((row["rank"], peer)))
            return op, "pp", both, peer
        op, who = _COLLECTIVES.get(kind, ("unknown", "tp"))
        if who == "dp":
            return op, "dp", self._all(lambda place: place[0] == stage), None
        if who == "ends":
            ends = self._all(lambda place: place[1] == replica and place[0] in {0, self.last})
            return op, "pp", ends, None
        return op, "world", self._all(lambda _place: who == "world"), None

    def _all(self, chosen: Any) -> tuple[int, ...]:
        return tuple(sorted(rank for place, rank in self.rank_of.items() if chosen(place)))

    def _number(self, key: tuple[Any, ...], kind: str) -> int:
        """Number of an operation within its group; each kind of collective has its own numbers."""
        self.count[key] += 1
        if kind in _COLLECTIVES:
            return self.count[key] * len(_COLLECTIVES) + list(_COLLECTIVES).index(kind)
        return self.count[key]
