"""Jobs that are given one --run-dir at the same moment each get a directory of their own."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest

from diag import rundir

if TYPE_CHECKING:
    from pathlib import Path


def _claim(path: Path, gate: Any, out: Any) -> None:
    gate.wait()
    out.put(str(rundir.claim(path)[0]))
    gate.wait()


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a finished run"])
def test_two_jobs_at_once_never_share_a_directory(tmp_path: Path, before: str) -> None:
    path = tmp_path / "r"
    if before != "nothing":
        path.mkdir()
    if before == "a finished run":
        rundir.write_json(path / "run.json", {"state": "finished"})
    context = multiprocessing.get_context("fork")
    gate, out = context.Barrier(3), context.Queue()
    jobs = [context.Process(target=_claim, args=(path, gate, out)) for _ in range(3)]
    for job in jobs:
        job.start()
    claimed = {out.get(timeout=30) for _ in jobs}
    for job in jobs:
        job.join(30)
    assert len(claimed) == 3
    assert str(path) in claimed
