"""`diag compare` and `diag export` on runs whose differences are known."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from collectors import schema
from diag.cli import group
from playbooks.metrics.resampling import ratio
from tests.playbooks.playbooks_jobs import Job, ddp

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def diag(*words: object) -> Result:
    return CliRunner().invoke(group, [str(word) for word in words], standalone_mode=False)


def code(done: Result) -> int:
    """What `diag` exits with: the command's own return value."""
    return done.exit_code or done.return_value


def written(job: Job, path: Path, **facts: Any) -> Path:
    """The job as the run directory of a finished run."""
    collected = job.collected()
    tables = path / "tables"
    tables.mkdir(parents=True)
    for name, table in collected.tables.items():
        pq.write_table(table, tables / f"{name}.parquet")
    (tables / "sources.json").write_text("[]")
    (tables / "schema_version").write_text(f"{schema.SCHEMA_VERSION}\n")
    (path / "run.json").write_text(json.dumps({**collected.run, **facts}))
    return path


def numbers(done: Result) -> dict[str, str]:
    return {n["name"]: n["verdict"] for n in json.loads(done.output)["numbers"]}


def test_a_run_compared_with_itself_has_not_changed(tmp_path: Path) -> None:
    run = written(ddp(), tmp_path / "a")
    done = diag("compare", run, run, "--format", "json", "--fail-on", "regression")
    answer = json.loads(done.output)
    assert code(done) == 0
    assert not answer["regression"]
    assert answer["changed"] == []
    assert set(numbers(done).values()) <= {"same", "unknown"}
    assert "No number moved" in answer["summary"]


def test_a_slower_run_is_a_regression_and_says_what_the_time_went_to(tmp_path: Path) -> None:
    a = written(ddp(data=2.0), tmp_path / "a")
    b = written(ddp(data=20.0), tmp_path / "b")
    done = diag("compare", a, b, "--format", "json", "--fail-on", "regression")
    assert code(done) == 1
    told = numbers(done)
    assert told["step time"] == "worse"
    assert told["tokens/s"] == "worse"
    assert told["data"] == "worse"
    assert told["forward"] == "same"
    back = diag("compare", b, a, "--format", "json", "--fail-on", "regression")
    assert code(back) == 0
    assert numbers(back)["step time"] == "better"


def test_a_new_root_cause_is_a_regression(tmp_path: Path) -> None:
    a = written(ddp(), tmp_path / "a")
    b = written(ddp(slow={2: 60.0}), tmp_path / "b")
    answer = json.loads(diag("compare", a, b, "--format", "json").output)
    assert answer["regression"]
    assert answer["runs"]["b"]["cause"] == "slow.straggler-compute"
    assert "slow.straggler-compute" in answer["summary"]


def test_what_the_runs_were_told_differs_by_name(tmp_path: Path) -> None:
    a = written(
        ddp(),
        tmp_path / "a",
        command=["torchrun", "--nproc-per-node", "4", "t.py", "lr=1"],
        environment={"NCCL_IB_DISABLE": "1"},
        code={"commit": "aaa"},
        versions={"torch": "2.13"},
    )
    b = written(
        ddp(8),
        tmp_path / "b",
        command=["torchrun", "--nproc-per-node", "8", "t.py", "lr=1", "wd=2"],
        environment={},
        code={"commit": "bbb"},
        versions={"torch": "2.14"},
    )
    answer = json.loads(diag("compare", a, b, "--format", "json").output)
    told = {(f["kind"], f["name"]): (f["a"], f["b"]) for f in answer["changed"]}
    assert told["layout", "world size"] == ("4", "8")
    assert told["command", "--nproc-per-node"] == ("4", "8")
    assert told["command", "wd"] == (None, "2")
    assert ("command", "lr") not in told
    assert told["environment", "NCCL_IB_DISABLE"] == ("1", None)
    assert told["code", "commit"] == ("aaa", "bbb")
    assert told["version", "torch"] == ("2.13", "2.14")


@pytest.mark.parametrize("form", ["text", "md", "html"])
def test_foreign_words_stay_words(tmp_path: Path, form: str) -> None:
    a = written(ddp(), tmp_path / "a", code={"commit": "<script>x</script>\x1b[31m"})
    b = written(ddp(), tmp_path / "b", code={"commit": "b"})
    done = diag("compare", a, b, "--format", form)
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert form == "text" or "<script>x" not in done.output


def test_losses_say_from_which_step_they_part(tmp_path: Path) -> None:
    a, b = ddp(), ddp()
    for row in b.rows["steps"]:
        if row["step"] >= 7:
            row["loss"] += 1.0
    done = diag("compare", written(a, tmp_path / "a"), written(b, tmp_path / "b"))
    assert "apart from step 7" in done.output


def test_noise_is_not_a_change_and_a_shift_beyond_it_is() -> None:
    chance = np.random.default_rng(3)
    a, b = chance.normal(100, 10, 200), chance.normal(100, 10, 200)
    same, slower = ratio(a, b), ratio(a, b * 1.2)
    assert same is not None
    assert same.low < 1 < same.high
    assert slower is not None
    assert slower.low > 1.1
    assert ratio(a[:3], b) is None


def test_an_export_opens_as_a_trace_with_every_rank_and_its_waits(tmp_path: Path) -> None:
    run = written(ddp(slow={2: 60.0}), tmp_path / "a")
    out = tmp_path / "trace.json.gz"
    assert diag("export", run, "-o", out).exit_code == 0
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in boxes} == {0, 1, 2, 3}
    assert sum(e["cat"] == "steps" for e in boxes) == 4 * 20
    assert sum(e["cat"] == "phases" for e in boxes) == 4 * 20 * 4
    assert sum(e["cat"] == "dp" for e in boxes) == 4 * 20 * 2
    assert min(e["ts"] for e in boxes) == 0
    starts = [e for e in events if e["ph"] == "s"]
    assert {e["pid"] for e in starts} == {2}
    assert len(starts) == sum(e["ph"] == "f" for e in events)
    overlapping(boxes)


def overlapping(boxes: list[dict[str, Any]]) -> None:
    """Perfetto drops boxes of one thread that overlap without nesting."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in boxes:
        rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for row in rows.values():
        row.sort(key=lambda one: (one[0], -one[1]))
        open_: list[float] = []
        for begin, end in row:
            while open_ and open_[-1] <= begin + 1e-6:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-6
            open_.append(end)


def test_a_run_without_times_cannot_be_exported(tmp_path: Path) -> None:
    run = written(Job(2), tmp_path / "a")
    done = diag("export", run, "-o", tmp_path / "t.json")
    assert isinstance(done.exception, click.UsageError)
    assert "nothing" in done.exception.message
    assert not (tmp_path / "t.json").exists()


def test_bad_paths_are_one_line(tmp_path: Path) -> None:
    for words in (("compare", tmp_path, tmp_path), ("export", tmp_path / "x", "-o", "t")):
        done = diag(*words)
        assert isinstance(done.exception, click.UsageError)
        assert "\n" not in done.exception.message
