"""`diag explain` and `diag report` as a person types them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from diag.cli import group
from playbooks import knowledge

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def diag(*words: str) -> Result:
    return CliRunner().invoke(group, list(words))


@pytest.mark.parametrize("identifier", list(knowledge.causes()))
def test_every_cause_can_be_explained(identifier: str) -> None:
    done = diag("explain", identifier)
    assert done.exit_code == 0
    flat = " ".join(done.output.split())
    cause = knowledge.cause(identifier)
    assert identifier in flat
    assert " ".join(cause.title.split()) in flat
    assert " ".join(cause.advice[0].split())[:40] in flat


def test_the_last_part_is_enough_where_it_is_unique() -> None:
    assert "hang.rank-died" in diag("explain", "rank-died").output


def test_json_holds_look_alikes_and_what_not_to_do() -> None:
    shown = json.loads(diag("explain", "hang.rank-died", "--format", "json").output)
    assert shown["cause"] == "hang.rank-died"
    assert shown["look_alikes"][0]["cause"] == "hang.rank-stalled"
    assert "raising the collective timeout" in shown["not_advice"]
    assert "not hang.rank-stalled" not in shown["decides"]


def test_markdown_has_a_heading_for_each_part() -> None:
    page = diag("explain", "oom.host", "--format", "md").output
    assert page.startswith("# oom.host\n")
    assert "## do" in page


def test_an_unknown_cause_is_exit_2_with_the_nearest() -> None:
    done = diag("explain", "hang.rank-dead")
    assert done.exit_code == 2
    assert "hang.rank-died" in done.output


def test_report_wants_a_run_directory(tmp_path: Path) -> None:
    done = diag("report", str(tmp_path))
    assert done.exit_code == 2
    assert "diag analyze" in done.output
    assert diag("report", str(tmp_path / "none")).exit_code == 2
    assert diag("report").exit_code == 2


def run_directory(path: Path, **more: object) -> Path:
    path.mkdir()
    facts = {"schema": "diag.run/1", "state": "finished", "exit_code": 3, "interrupted": False}
    (path / "run.json").write_text(json.dumps({**facts, **more}))
    ends = [{"rank": 0, "attempt": 0, "host": "a", "ended_ns": 10**18, "exit_code": None,
             "signal": 11, "status_from": "proc", "pid": 5}]  # fmt: skip
    (path / "exits.jsonl").write_text("".join(json.dumps(e) + "\n" for e in ends))
    return path


def test_report_answers_in_every_form(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    shown = json.loads(diag("report", str(run), "--format", "json").output)
    assert shown["verdict"]["cause"] == "crash.native-fault"
    assert shown["verdict"]["ranks"] == [0]
    assert "SIGSEGV" in diag("report", str(run)).output
    assert diag("report", str(run), "--format", "md").output.startswith("# Rank 0 crashed")
    page = tmp_path / "page.html"
    assert diag("report", str(run), "--format", "html", "-o", str(page)).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_fail_on_root_makes_a_root_exit_1(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    done = CliRunner().invoke(
        group, ["report", str(run), "--fail-on", "root"], standalone_mode=False
    )
    assert done.return_value == 1


def test_several_runs_are_shown_one_after_another(tmp_path: Path) -> None:
    runs = [str(run_directory(tmp_path / name)) for name in ("a", "b")]
    assert diag("report", *runs).output.count("crash.native-fault") == 2
    assert diag("report", *runs, "--format", "json").exit_code == 2
