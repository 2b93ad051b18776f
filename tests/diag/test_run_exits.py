"""How ranks end is seen by somebody who is not their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from diag.exits import Exit, RankExits, complete, from_launcher

PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "100"])
print(child.pid, flush=True)
child.wait()          # reaps at once, as a launcher may
time.sleep(100)
"""


@pytest.fixture
def grandchild():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    yield int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()


def wait_for(exits: RankExits) -> list[Exit]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ended = exits.wait(1.0)
        if ended:
            return ended
    return []


def test_the_signal_that_killed_a_grandchild_is_seen(grandchild: int) -> None:
    exits = RankExits("here")
    exits.follow(3, 1, grandchild)
    assert exits.wait(0.05) == []
    assert exits.running() == {(3, 1)}
    os.kill(grandchild, signal.SIGKILL)
    (end,) = wait_for(exits)
    assert (end.rank, end.attempt, end.pid, end.host) == (3, 1, grandchild, "here")
    if end.status_from == "proc":  # older kernels tell only while the zombie stands
        assert (end.signal, end.exit_code) == (signal.SIGKILL, None)
    assert exits.running() == set()
    exits.follow(3, 1, grandchild)
    assert exits.running() == set()


def test_a_zombie_tells_its_exit_code() -> None:
    child = subprocess.Popen(["sh", "-c", "exit 7"])
    exits = RankExits("here")
    exits.follow(0, 0, child.pid)
    (end,) = wait_for(exits)
    child.wait()
    assert (end.exit_code, end.signal, end.status_from) == (7, None, "proc")


def test_without_pidfds_proc_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen(["sh", "-c", "sleep 0.2; kill -SEGV $$"])
    exits = RankExits("here")
    exits.follow(0, 0, child.pid)
    (end,) = wait_for(exits)
    child.wait()
    assert (end.exit_code, end.signal) == (None, signal.SIGSEGV)


def test_a_process_that_was_gone_before_we_looked_is_unknown_until_the_launcher_tells() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    exits = RankExits("here")
    exits.follow(0, 0, child.pid)
    (end,) = wait_for(exits)
    assert (end.exit_code, end.signal, end.status_from) == (None, None, "unknown")
    printed = from_launcher(
        f"failed (exitcode: -9) local_rank: 0 (pid: {child.pid}) of binary: /usr/bin/python\n"
        "  exitcode  : 1 (pid: 77)\n  exitcode  : -15 (pid: 28218)  (SIGTERM)\n"
    )
    assert printed == {child.pid: -9, 77: 1, 28218: -15}
    (known,) = complete([end], printed)
    assert (known.exit_code, known.signal, known.status_from) == (None, 9, "launcher-log")
