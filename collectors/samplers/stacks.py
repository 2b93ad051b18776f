"""Python stacks of running processes, taken from outside with py-spy.

In: process ids. Out: one mapping a process, threads with frames innermost first, or a `problem`.
Works while a process holds its GIL for ever or sits in a system call; the process is paused for
some milliseconds and otherwise left alone. Never raises, never waits longer than its timeout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT = 20.0
"""Seconds one dump may take; py-spy needs about one on an idle machine."""


def find_py_spy() -> str | None:
    """The py-spy that was installed beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def parse(text: str, pid: int) -> list[dict[str, Any]]:
    """Threads out of `py-spy dump --json`; ValueError when the text is something else."""
    threads = json.loads(text)
    if not isinstance(threads, list):
        raise TypeError("py-spy did not print a list of threads")
    parsed = []
    for thread in threads:
        state = "gil" if thread["owns_gil"] else "active" if thread["active"] else "idle"
        name = thread.get("thread_name") or f"thread {thread.get('os_thread_id')}"
        parsed.append(
            {
                "name": name,
                "main": thread.get("os_thread_id") == pid or name == "MainThread",
                "state": state,
                "frames": [f"{f['name']} ({f['filename']}:{f['line']})" for f in thread["frames"]],
            }
        )
    return parsed


def dump(pid: int, timeout: float = TIMEOUT) -> tuple[list[dict[str, Any]], str | None]:
    """(threads, problem) of one process; exactly one of them is empty."""
    tool = find_py_spy()
    if tool is None:
        return [], "py-spy is not installed"
    try:
        done = subprocess.run(
            [tool, "dump", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            start_new_session=True,  # a Ctrl-C is for the job
        )
        if done.returncode == 0:
            return parse(done.stdout.decode("utf-8", "replace"), pid), None
    except subprocess.TimeoutExpired:
        return [], f"py-spy gave no answer within {timeout:.0f} s"
    except (OSError, ValueError, TypeError, KeyError) as wrong:
        return [], f"py-spy: {wrong}"
    words = [w.strip() for w in done.stderr.decode("utf-8", "replace").splitlines() if w.strip()]
    reason = words[-1] if words else f"exit code {done.returncode}"
    return [], f"py-spy: {reason[:300]}"


def dump_all(pids: Sequence[int], timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """`{"pid", "threads", "problem"}` of each process, as many at a time as there are cores."""
    if not pids:
        return []
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(len(pids), max(1, cores)), "stacks") as pool:
        answers = pool.map(lambda pid: dump(pid, timeout), pids)
        return [
            {"pid": pid, "threads": threads, "problem": problem}
            for pid, (threads, problem) in zip(pids, answers, strict=True)
        ]
