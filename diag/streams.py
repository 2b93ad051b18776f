"""The parent's side of the relay: the job's output streams, and who else got a signal.

Each of stdout and stderr becomes a pseudo-terminal where diag's own is a terminal, and a pipe
otherwise; both become one where both go to the same place, so that their order stays exact.
Nothing here reads the job's output: `relay.py`, a process of its own, does.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from diag import relay

RELAY = Path(relay.__file__)


@dataclass(frozen=True)
class Streams:
    """What the job's file descriptors 1 and 2 become, and the process that empties them."""

    job: dict[int, int]
    """Job's descriptor -> descriptor of ours to duplicate; close with `close` after the start."""
    relay: int
    """Process id of the relay."""

    def close(self) -> None:
        """Give up our ends, so that the relay sees the job's end."""
        for fd in set(self.job.values()):
            os.close(fd)


def _same(a: int, b: int) -> bool:
    one, other = os.fstat(a), os.fstat(b)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _open(like: int) -> tuple[int, int]:
    """(our reading end, the job's writing end) of the kind that descriptor `like` is."""
    if not os.isatty(like):
        return os.pipe()
    ours, jobs = pty.openpty()
    with contextlib.suppress(termios.error):
        mode = termios.tcgetattr(like)
        mode[1] &= ~termios.OPOST  # the real terminal does this once, behind us
        termios.tcsetattr(jobs, termios.TCSANOW, mode)
    relay.follow_size(ours, like)
    return ours, jobs


def ensure_standard() -> None:
    """Open /dev/null for each of 0, 1, 2 that is closed; else a pipe of ours would land there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def start(copies: Path | None) -> Streams:
    """Open the streams and start the relay; copies go to job.stdout and job.stderr in `copies`."""
    plan = [(1, "job.stdout", [1]), (2, "job.stderr", [2])]
    if _same(1, 2):
        plan = [(1, "job.stdout", [1, 2])]
    job: dict[int, int] = {}
    words: list[str] = []
    sources: list[int] = []
    for out, name, targets in plan:
        ours, jobs = _open(out)
        os.set_inheritable(ours, True)
        sources.append(ours)
        words.append(f"{ours}:{out}:{copies / name if copies else ''}")
        job.update(dict.fromkeys(targets, jobs))
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", str(RELAY), *words],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsigmask=relay.WITNESSED | relay.CONTROL,
    )
    for fd in sources:
        os.close(fd)
    return Streams(job, pid)


def _pending(pid: int, number: int) -> bool:
    """Whether signal `number` waits, blocked, at process `pid`."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
        if line.startswith(("ShdPnd:", "SigPnd:")) and int(line.split()[1], 16) >> number - 1 & 1:
            return True
    return False


def sent_to_group(number: int, witness: int) -> bool:
    """Whether signal `number`, just received, went to the whole process group.

    A kernel-made Ctrl-C, a shell's `kill %1` or a launcher that signals every process of a job step
    reach the witness too, where the signal stays pending; a signal to diag alone does not. Makes
    the witness forget it, so that each signal is judged once. Without a witness: False.
    """
    time.sleep(0.002)  # the kernel may still be going through the group
    try:
        if not _pending(witness, number):
            return False
        os.kill(witness, signal.SIGRTMIN + number)
        for _ in range(25):
            if not _pending(witness, number):
                break
            time.sleep(0.002)
    except OSError:
        return False
    return True
