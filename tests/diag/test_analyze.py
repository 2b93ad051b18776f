"""`diag analyze` answers for piles of files, abstains when nothing decides, keeps stdout clean."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from diag.cli import group

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

_SUMMARY = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in main
[rank1]:     batch = data["x"]
[rank1]: KeyError: 'x'
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-10-21_14:08:00
  host      : gx1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 13774)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def _run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(group, ["analyze", *arguments], input=stdin)


def _json(*arguments: str, stdin: str | bytes | None = None) -> dict[str, Any]:
    result = _run(*arguments, "--format", "json", stdin=stdin)
    assert result.exit_code == 0 or result.return_value == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def _dump(rank: int, last: int) -> bytes:
    entries = [
        {
            "record_id": n,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": n + 1,
            "p2p_seq_id": 0,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_700_000_000_000_000_000 + n,
            "input_sizes": [[8]],
            "input_dtypes": ["Float"],
            "output_sizes": [[8]],
            "output_dtypes": ["Float"],
            "state": "completed" if n + 1 < 5 else "scheduled",
            "retired": n + 1 < 5,
            "is_p2p": False,
        }
        for n in range(last)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries}, 2)


def _dumps(folder: Path) -> None:
    """Rank 2 never joins collective 5."""
    for rank in range(4):
        (folder / f"trace_{rank}").write_bytes(_dump(rank, 4 if rank == 2 else 5))


def test_dumps_name_the_rank_that_did_not_join(tmp_path: Path) -> None:
    _dumps(tmp_path)
    answer = _json(str(tmp_path))
    assert answer["schema"] == "diag.report/1"
    assert answer["verdict"]["ranks"] == [2]
    assert answer["coverage"]["ranks_seen"] == [0, 1, 2, 3]
    assert answer["verdict"]["evidence"]


def test_a_torchrun_log_names_the_exception_from_a_file_and_from_stdin(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(_SUMMARY)
    from_file = _json(str(tmp_path / "job.out"))
    from_stdin = _json("-", stdin=_SUMMARY)
    for answer in (from_file, from_stdin):
        assert answer["verdict"]["cause"] == "crash.user-exception"
        assert answer["verdict"]["ranks"] == [1]
    assert from_stdin["coverage"]["sources"][0]["path"] == "-"


def test_the_order_of_arguments_decides_nothing(tmp_path: Path) -> None:
    _dumps(tmp_path)
    paths = [str(tmp_path / f"trace_{r}") for r in range(4)]
    assert _json(*paths) == _json(*paths[::-1])


def test_text_that_decides_nothing_is_an_abstention(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("it broke again\n")
    answer = _json(str(tmp_path))
    assert answer["verdict"] is None
    assert answer["abstained"]["need"]


@pytest.mark.parametrize("form", ["text", "json", "md", "html"])
def test_every_form_goes_to_a_file_and_leaves_stdout_empty(tmp_path: Path, form: str) -> None:
    (tmp_path / "job.out").write_text(_SUMMARY)
    out = tmp_path / f"answer.{form}"
    result = _run(str(tmp_path / "job.out"), "--format", form, "-o", str(out))
    assert result.stdout == ""
    assert "crash.user-exception" in out.read_text(encoding="utf-8")


def test_fail_on_root_makes_a_root_exit_1_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(_SUMMARY)
    (tmp_path / "notes.txt").write_text("it broke again\n")
    root = group.main(
        ["analyze", str(tmp_path / "job.out"), "--fail-on", "root"], "diag", standalone_mode=False
    )
    none = group.main(
        ["analyze", str(tmp_path / "notes.txt"), "--fail-on", "root"], "diag", standalone_mode=False
    )
    assert (root, none) == (1, 0)


def test_nothing_readable_is_exit_2_with_one_line(tmp_path: Path) -> None:
    gone = _run(str(tmp_path / "gone"))
    assert (gone.exit_code, gone.stdout) == (2, "")
    assert "nothing readable" in gone.stderr


def test_files_of_no_known_format_get_an_abstention_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 40)
    for arguments, stdin in (((str(tmp_path),), None), (("-",), "")):
        result = CliRunner().invoke(
            group, ["analyze", *arguments, "--format", "json"], input=stdin, standalone_mode=False
        )
        assert result.return_value == 2
        assert result.stderr.count("\n") == 1
        answer = json.loads(result.stdout)
        assert answer["abstained"]["need"]
        assert {s["read"] for s in answer["coverage"]["sources"]} == {"none"}


def test_a_missing_path_beside_a_readable_one_is_said_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(_SUMMARY)
    result = _run(str(tmp_path / "job.out"), str(tmp_path / "gone"), "--format", "json")
    assert json.loads(result.stdout)["verdict"] is not None
    assert "there is no such file" in result.stderr


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(_SUMMARY)
    result = _run(str(tmp_path / "job.out"), "-o", str(tmp_path / "no" / "such" / "place"))
    assert result.exit_code != 0
    assert "cannot write" in result.stderr
    assert "Traceback" not in result.stderr
