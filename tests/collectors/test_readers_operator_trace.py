"""Operator traces in Parquet: what a study of stragglers keeps of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from collectors.readers import operator_trace, read_paths

if TYPE_CHECKING:
    from pathlib import Path


def row(stage: int, kind: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return {
        "dp_rank": 0, "stage": stage, "rank": stage, "step": 5, "optype": kind,
        "start_ts": start, "duration": duration, "seq_id": 0, "mb_id": 0, **more,
    }  # fmt: skip


ROWS = [
    row(0, "forward-compute", 0.0, 0.5),
    row(0, "forward-send", 0.5, 0.1),
    row(1, "forward-recv", 0.0, 0.6),
    row(1, "forward-compute", 0.6, 0.4),
    row(0, "optimizer-clip-main-grad", 0.6, 0.5, mb_id=-1),
    row(1, "optimizer-clip-main-grad", 1.0, 0.1, mb_id=-1),
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_computation_becomes_phases_and_the_rest_operations_of_groups(tmp_path: Path) -> None:
    collected = read_paths([str(written(tmp_path / "x.bin", ROWS))])
    assert [s.kind for s in collected.sources] == [operator_trace.KIND]
    assert collected.world_size == 2
    assert sorted((p["rank"], p["phase"]) for p in collected.rows("phases")) == [
        (0, "forward"),
        (1, "forward"),
    ]
    calls = {(c["rank"], c["op"]): c for c in collected.rows("collectives")}
    assert calls[0, "send"]["peer"] == 1
    assert calls[1, "recv"]["peer"] == 0
    assert calls[0, "send"]["group_id"] == calls[1, "recv"]["group_id"] == "pp[0,1]"
    assert calls[0, "all_reduce"]["seq"] == calls[1, "all_reduce"]["seq"]
    assert {s["end_ns"] - s["start_ns"] for s in collected.rows("steps")} == {1_100_000_000}


@pytest.mark.parametrize("keep", [4, 200, 0.5, 0.99])
def test_cut_and_foreign_parquet_is_one_sentence(tmp_path: Path, keep: float) -> None:
    path = written(tmp_path / "x", ROWS)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    (source,) = read_paths([str(path)]).sources
    assert source.read == "none"
    assert "\n" not in source.problems[0]
    (foreign,) = read_paths([str(written(tmp_path / "y", [{"a": 1}]))]).sources
    assert "without the column(s)" in foreign.problems[0]


def test_rows_without_rank_or_time_are_counted_and_left_out(tmp_path: Path) -> None:
    odd = [row(0, "forward-compute", float("nan"), 1.0), row(0, "x", 0.0, -1.0, rank=None)]
    collected = read_paths([str(written(tmp_path / "x", [*ROWS, *odd]))])
    assert collected.sources[0].problems == (
        "2 operators without rank, step or time were left out",
    )


def test_the_number_of_rows_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_trace, "ROWS", 3)
    (source,) = read_paths([str(written(tmp_path / "x", ROWS))]).sources
    assert "more than 3 operators" in source.problems[0]
