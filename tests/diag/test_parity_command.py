"""`diag parity` as a script sees it. Equality itself is the matter of tests/trainer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diag", "parity", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.ranks
def test_an_equal_layout_is_exit_0_and_a_row() -> None:
    done = _run("parallel.tp=2", "--format", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["dtype"]) == ("diag.parity/1", "float64")
    (row,) = answer["rows"]
    assert row["equal"] is True
    assert row["first_difference"] is None
    assert 0 <= row["worst_relative"] < 1e-10
    assert row["layout"]["tp"] == 2


def test_settings_that_cannot_work_are_one_line_and_exit_2() -> None:
    done = _run("parallel.tp=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
