"""The small parts of a run: its directory, its switches, its relay, its capture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectors.samplers.proc import stat
from diag import capture, relay, rundir, switches


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["torchrun", "--nproc-per-node", "2", "tests/plain_ddp.py", "--out", "x.py"], "plain_ddp"),
        (["torchrun", "--nproc-per-node", "4", "-m", "trainer", "--config", "a.toml"], "trainer"),
        (["python", "-m", "my.pkg.train"], "train"),
        (["/usr/bin/sleep", "3"], "sleep"),
        (["./a b$c"], "a-b-c"),
        (["train.py"], "train"),
        (["..."], "job"),
    ],
)
def test_a_run_is_called_after_its_script(command: list[str], name: str) -> None:
    assert rundir.name_of(command) == name


def test_default_directories_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = {rundir.make("x") for _ in range(3)}
    assert len(made) == 3
    assert all(path.is_dir() for path in made)


def test_an_earlier_run_is_moved_aside_and_a_running_one_left_alone(tmp_path: Path) -> None:
    wanted = tmp_path / "r"
    assert rundir.claim(wanted) == (wanted, None)
    rundir.write_json(wanted / "run.json", {"state": "finished", "mark": 1})
    path, moved = rundir.claim(wanted)
    assert path == wanted
    assert moved is not None
    assert json.loads((tmp_path / "r.1/run.json").read_text())["mark"] == 1
    assert list(wanted.iterdir()) == []
    alive = {"state": "running", "host": os.uname().nodename, "pid": os.getpid()}
    rundir.write_json(wanted / "run.json", alive)
    path, moved = rundir.claim(wanted)
    assert path == tmp_path / "r.2"
    assert moved is not None
    assert "still going" in moved
    assert (wanted / "run.json").exists()


def test_switches_leave_alone_what_the_user_set(tmp_path: Path) -> None:
    chosen, kept = switches.choose({}, tmp_path, "n1")
    assert kept == ()
    assert chosen["NCCL_DEBUG_FILE"] == str(tmp_path / "nodes/n1/nccl.%h.%p.log")
    assert chosen["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "captures/flight_recorder/rank_")
    user = {"NCCL_DEBUG": "INFO", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "PATH": "/bin"}
    chosen, kept = switches.choose(user, tmp_path, "n1")
    assert set(kept) == {"NCCL_DEBUG", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
    assert set(chosen) == {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"}


def test_a_copy_keeps_head_and_tail_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "HEAD", 100)
    monkeypatch.setattr(relay, "TAIL", 200)
    monkeypatch.setattr(relay, "LIMIT", 1000)
    path = tmp_path / "copy"
    copy = relay.Copy(str(path))
    total = 0
    for number in range(500):
        line = b"line %d\n" % number
        total += len(line)
        copy.write(line)
    lines = path.read_bytes().splitlines()
    assert path.stat().st_size <= 1000
    assert lines[0] == b"line 0"
    assert lines[-1] == b"line 499"
    (note,) = (line for line in lines if b"left out" in line)
    kept = sum(len(line) + 1 for line in lines) - len(note) - 1
    assert int(note.split()[1]) == total - kept


def test_a_full_disk_ends_the_copy_and_not_the_output(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for_job, jobs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", relay.__file__, f"{for_job}:1:/dev/full"],
        pass_fds=[for_job],
        stdout=subprocess.PIPE,
    )
    os.close(for_job)
    os.write(jobs, b"one\n")
    os.write(jobs, b"two\n")
    os.close(jobs)
    out, _ = process.communicate(timeout=20)
    assert out == b"one\ntwo\n"
    assert process.returncode == 0


def test_a_capture_holds_both_looks_and_problems_beside_them(tmp_path: Path) -> None:
    script = "import time\ndef stuck(): time.sleep(100)\nprint(1, flush=True)\nstuck()"
    sleeper = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    gone = subprocess.Popen(["true"])
    gone.wait()
    capture.take(tmp_path / "c", {0: sleeper.pid, 5: gone.pid}, "here", apart=0.2)
    assert stat(sleeper.pid) is not None  # it lives on
    sleeper.kill()
    sleeper.wait()
    sleeper.stdout.close()
    looks = [json.loads((tmp_path / f"c/stacks-{i}.json").read_text()) for i in (0, 1)]
    assert looks[0]["time_ns"] < looks[1]["time_ns"]
    for look in looks:
        assert [r["rank"] for r in look["ranks"]] == [0, 5]
        assert look["ranks"][1]["problem"]
    seen = json.loads((tmp_path / "c/proc.json").read_text())
    assert seen["ranks"][0]["state"] == "S"
    assert seen["ranks"][0]["cpu_share"] < 0.5
    assert seen["ranks"][1]["state"] is None
    assert json.loads((tmp_path / "c/host.json").read_text())["memory"]["MemTotal"] > 0
