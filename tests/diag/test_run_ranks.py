"""Real ranks under `diag run`: a tidy end, a rank that is stuck, a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from collectors.agent.live import LiveRanks

pytestmark = pytest.mark.ranks
SCRIPTS = Path(__file__).parents[1] / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def start(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "diag", "run", "--run-dir", str(run_dir), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def ends(run_dir: Path) -> dict[int, dict[str, Any]]:
    lines = map(json.loads, (run_dir / "exits.jsonl").open())
    return {end["rank"]: end for end in lines}


def test_a_job_that_never_destroys_its_groups_ends_well(tmp_path: Path) -> None:
    """Our hooks on the groups must not outlive the interpreter: that was a SIGSEGV at exit."""
    job = start(tmp_path / "r", "--", *TORCHRUN, str(SCRIPTS / "stuck_rank.py"), "0")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    # Two ranks print at once, so lines may stick together.
    assert sorted("".join(out.split())) == sorted("done0done1")
    run = read(tmp_path / "r/run.json")
    assert (run["state"], run["exit_code"], run["world_size"]) == ("finished", 0, 2)
    assert [(e["exit_code"], e["signal"]) for _, e in sorted(ends(tmp_path / "r").items())] == [
        (0, None),
        (0, None),
    ]
    report = read(tmp_path / "r/report.json")
    assert report["health"] is not None
    assert (tmp_path / "r/report.html").stat().st_size > 1000


def test_a_stuck_rank_is_named_while_it_is_stuck_and_the_job_ended_on_request(
    tmp_path: Path,
) -> None:
    job = start(
        tmp_path / "r",
        *("--hang-after", "3", "--on-hang", "kill", "--"),
        *(*TORCHRUN, str(SCRIPTS / "stuck_rank.py"), "600"),
    )
    _, err = job.communicate(timeout=240)
    assert job.returncode == 1  # torchrun's own answer to SIGTERM
    before, _, _ = err.partition("diag: ending the job, because it is stuck")
    assert "hang.rank-stalled" in before
    run_dir = tmp_path / "r"
    (hang,) = read(run_dir / "run.json")["hangs"]
    assert hang["verdict_ns"] > hang["detected_ns"] > hang["since_ns"]
    look = read(run_dir / hang["capture"] / "stacks-1.json")
    stuck = next(r for r in look["ranks"] if r["rank"] == 1)
    main = next(t for t in stuck["threads"] if t["main"])
    assert main["frames"][0].startswith("read_shard (")
    report = read(run_dir / "report.json")
    assert (report["verdict"]["cause"], report["verdict"]["ranks"]) == ("hang.rank-stalled", [1])
    assert {end["signal"] for end in ends(run_dir).values()} <= {signal.SIGTERM, signal.SIGKILL}


def test_a_killed_rank_of_mp_spawn_is_seen_by_its_signal(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    job = start(run_dir, "--", sys.executable, str(SCRIPTS / "spawn_ddp.py"), "100000")
    live = LiveRanks(run_dir)
    until = time.monotonic() + 200
    victim = None
    while victim is None and time.monotonic() < until and job.poll() is None:
        victim = next((r.pid for r in live.poll() if r.rank == 1 and r.steps >= 3), None)
        time.sleep(0.1)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    job.communicate(timeout=240)
    assert job.returncode == 1
    end = ends(run_dir)[1]
    assert end["pid"] == victim
    if end["status_from"] == "proc":  # mp.spawn reaps at once: older kernels cannot tell
        assert end["signal"] == signal.SIGKILL
        verdict = read(run_dir / "report.json")["verdict"]
        assert (verdict["cause"], verdict["ranks"]) == ("hang.rank-died", [1])
