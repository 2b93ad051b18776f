"""The watcher with real processes and a made-up log: hangs, stops, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from diag.watch import Hang, HangPolicy
from diag.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class View:
    rank: int
    pid: int
    attempt: int = 0
    host: str = "here"
    records: int = 5
    last_ns: int = 7
    steps: int = 3
    step_median_ns: int | None = None
    closed: bool = False
    phase: str | None = None


class FakeLive:
    def __init__(self, views: list[View]) -> None:
        self.views = views

    def poll(self) -> list[View]:
        return self.views


@pytest.fixture
def two():
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


class Watch:
    """A watcher with a hang-after of half a second, and what it called back with."""

    def __init__(self, run_dir: Path, live: FakeLive) -> None:
        self.hangs: list[tuple[Hang, dict[int, int]]] = []
        self.called = threading.Event()
        self.watcher = Watcher(run_dir, live, HangPolicy(after=0.5), "here", self._hang)
        self.watcher.start()

    def _hang(self, hang: Hang, pids: dict[int, int]) -> None:
        self.hangs.append((hang, pids))
        self.called.set()


def soon(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.05)
    return False


def test_a_silent_job_is_reported_once_with_the_processes_of_this_host(
    tmp_path: Path, two: list[subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]
) -> None:
    far = View(2, 1, host="elsewhere")
    live = FakeLive([View(0, two[0].pid), View(1, two[1].pid), far])
    watch = Watch(tmp_path, live)
    assert watch.called.wait(20)
    live.views = [replace(live.views[0], records=6), *live.views[1:]]
    said = ""

    def resumed() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "make progress again" in said

    assert soon(resumed)
    watch.watcher.stop()
    assert watch.hangs[0] == (Hang(since_ns=7, after=0.5), {0: two[0].pid, 1: two[1].pid})


def test_a_stopped_rank_is_said_and_is_no_hang(
    tmp_path: Path, two: list[subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(two[1].pid, signal.SIGSTOP)
    watch = Watch(tmp_path, FakeLive([View(0, two[0].pid), View(1, two[1].pid)]))
    said = ""

    def told() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "rank 1 is stopped" in said

    assert soon(told)
    assert watch.hangs == []
    os.kill(two[1].pid, signal.SIGCONT)
    assert watch.called.wait(20)
    watch.watcher.stop()


def test_ends_are_written_as_they_happen_and_the_dead_do_not_hang(
    tmp_path: Path, two: list[subprocess.Popen[bytes]]
) -> None:
    watch = Watch(tmp_path, FakeLive([View(0, two[0].pid), View(1, two[1].pid)]))
    path = tmp_path / "exits.jsonl"
    two[1].kill()
    assert soon(lambda: path.exists() and path.read_text().endswith("\n"))
    two[0].terminate()
    assert soon(lambda: path.read_text().count("\n") == 2)
    before = len(watch.hangs)
    time.sleep(1.0)
    watch.watcher.stop()
    assert len(watch.hangs) == before
    ends = {end["rank"]: end for end in map(json.loads, path.open())}
    assert (ends[1]["signal"], ends[0]["signal"]) == (signal.SIGKILL, signal.SIGTERM)
    assert all(end["status_from"] == "proc" for end in ends.values())
