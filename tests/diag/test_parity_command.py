"""`diag parity` as a script sees it. Equality itself is the matter of tests/trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.ranks
def test_a_model_of_ones_own_is_proved_module_by_module() -> None:
    model = ("--model", "trainer/examples/gpt.py", "--layers", "--format", "json")
    done = _run("parallel.tp=2", "parallel.sp=true", *model)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["equal"], row["not_compared"]) == (True, [])
    assert row["modules_compared"] > 40


@pytest.mark.ranks
def test_an_error_in_ones_own_model_is_one_line_with_its_place(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from torch import nn\nclass M(nn.Embedding):\n    def forward(self, x):\n"
        "        return super().forward(x) @ 3\ndef model():\n    return M(256, 256)\n"
    )
    done = _run("--model", str(mine))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"{mine}:4: TypeError" in done.stderr
