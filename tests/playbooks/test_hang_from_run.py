"""What a run directory tells of a hang and its end, from files to tables and run.json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from collectors.store import read_run
from diag.record import RunRecord

if TYPE_CHECKING:
    from pathlib import Path


def test_the_share_of_a_core_between_two_looks_stands_beside_the_stacks(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": "diag.run/1", "state": "running"}')
    folder = tmp_path / "captures" / "0001-hang"
    folder.mkdir(parents=True)
    thread = {"name": "MainThread", "main": True, "state": "idle", "frames": ["f (a.py:1)"]}
    ranks = [{"rank": r, "pid": 10 + r, "threads": [thread]} for r in range(2)]
    for look in range(2):
        (folder / f"stacks-{look}.json").write_text(json.dumps({"time_ns": look, "ranks": ranks}))
    used = {"ranks": [{"rank": 1, "cpu_share": 0.25}, {"rank": 0, "cpu_share": None}]}
    (folder / "proc.json").write_text(json.dumps(used))
    rows = read_run(tmp_path).rows("stacks")
    assert [(r["rank"], r["cpu_share"]) for r in rows] == [(0, None), (1, 0.25)] * 2


def test_only_the_last_hang_gets_the_time_of_its_end_and_only_once(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "job", ["train"], "node0")
    record.resumed()
    record.hang(0, detected_ns=5)
    record.resumed()
    first = json.loads((tmp_path / "run.json").read_text())["hangs"]
    assert first[0]["detected_ns"] == 5 and first[0]["resumed_ns"] > 5
    record.hang(1, detected_ns=9)
    second = json.loads((tmp_path / "run.json").read_text())["hangs"]
    assert second[0] == first[0] and "resumed_ns" not in second[1]
