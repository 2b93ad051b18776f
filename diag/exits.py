"""How rank processes end: exit code or signal, seen by somebody who is not their parent.

    kernel >= 6.15   a pidfd tells it even after the launcher has reaped the process
    kernel >= 5.3    a pidfd says when; /proc/PID/stat tells it while the process is a zombie
    older            /proc/PID/stat, looked at every 25 ms
    otherwise        what torchrun printed (`exitcode: -9 (pid: 123)`), or unknown

Waiting costs nothing where there are pidfds. The watched processes never notice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from collectors.samplers import proc

if TYPE_CHECKING:
    from collections.abc import Iterable

_GLANCE = 0.025
"""Seconds between looks where the kernel cannot wake us."""
_INFO = struct.Struct("QQ12i")
"""struct pidfd_info, first version (linux/pidfd.h): mask, cgroup, ten ids and parts, exit code."""
_GET_INFO = 0xC000FF0B | _INFO.size << 16
"""PIDFD_GET_INFO = _IOWR(0xFF, 11, struct pidfd_info)."""
_WANT_EXIT = 1 << 3
"""PIDFD_INFO_EXIT: the mask bit that asks for, and confirms, the exit code."""


@dataclass(frozen=True)
class Exit:
    """One line of exits.jsonl."""

    rank: int
    attempt: int
    pid: int
    host: str
    ended_ns: int
    exit_code: int | None
    signal: int | None
    status_from: str
    """"proc" (the kernel told), "launcher-log" or "unknown"."""

    def as_json(self) -> dict[str, Any]:
        """The line as a mapping."""
        return asdict(self)


@dataclass
class _Watched:
    rank: int
    attempt: int
    pid: int
    fd: int | None
    start_ticks: int | None


def _info(fd: int) -> int | None:
    """Wait status of a process that was reaped, by its pidfd; None when the kernel cannot say."""
    buffer = bytearray(_INFO.pack(_WANT_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(fd, _GET_INFO, buffer, True)
    except OSError:
        return None
    fields = _INFO.unpack(buffer)
    return fields[13] if fields[0] & _WANT_EXIT else None


class RankExits:
    """Follows the rank processes of this host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._known: set[tuple[int, int, int]] = set()
        self._poll = select.poll()
        self.seen: list[Exit] = []
        """All ends so far, in order."""

    def follow(self, rank: int, attempt: int, pid: int) -> None:
        """Watch this process; naming one again is harmless."""
        if (rank, attempt, pid) in self._known:
            return
        self._known.add((rank, attempt, pid))
        stat = proc.stat(pid)
        fd = None
        with contextlib.suppress(OSError, AttributeError):  # gone, or a kernel without pidfds
            fd = os.pidfd_open(pid)
            self._poll.register(fd, select.POLLIN)
        self._watched[rank, attempt] = _Watched(
            rank, attempt, pid, fd, stat.start_ticks if stat else None
        )

    def running(self) -> set[tuple[int, int]]:
        """(rank, attempt) of the processes that have not ended."""
        return set(self._watched)

    def running_pids(self) -> list[int]:
        """The same as process ids."""
        return [one.pid for one in self._watched.values()]

    def wait(self, seconds: float) -> list[Exit]:
        """Ends that happen within `seconds`; returns at the first."""
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            if any(w.fd is None for w in self._watched.values()):
                left = min(left, _GLANCE)
            ready = {fd for fd, _ in self._poll.poll(left * 1000)}
            ended = [
                end
                for one in list(self._watched.values())
                if (one.fd is None or one.fd in ready) and (end := self._look(one))
            ]
            if ended or time.monotonic() >= until:
                return ended

    def _look(self, one: _Watched) -> Exit | None:
        now = proc.stat(one.pid)
        status = None
        if now is not None and now.start_ticks == one.start_ticks:
            if now.state not in "ZX":
                return None
            status = now.wait_status
        if one.fd is not None:
            told = _info(one.fd)
            status = told if told is not None else status
            self._poll.unregister(one.fd)
            os.close(one.fd)
        del self._watched[one.rank, one.attempt]
        end = Exit(
            one.rank, one.attempt, one.pid, self._host, time.time_ns(), None, None, "unknown"
        )
        if status is not None:
            end = _with_status(end, status)
        self.seen.append(end)
        return end


def _with_status(end: Exit, status: int) -> Exit:
    if os.WIFSIGNALED(status):
        return replace(end, signal=os.WTERMSIG(status), status_from="proc")
    return replace(end, exit_code=os.WEXITSTATUS(status), status_from="proc")


_EXITCODE = re.compile(r"exitcode\s*:\s*(-?\d+)\)?(?: local_rank: \d+)? \(pid: (\d+)\)")


def from_launcher(text: str) -> dict[int, int]:
    """Process id -> exit code (minus the signal) that torchrun printed."""
    return {int(pid): int(code) for code, pid in _EXITCODE.findall(text)}


def complete(ends: Iterable[Exit], printed: dict[int, int]) -> list[Exit]:
    """Fill what only the launcher knew."""
    filled = []
    for end in ends:
        code = printed.get(end.pid)
        if end.status_from == "unknown" and code is not None:
            known = {"signal": -code} if code < 0 else {"exit_code": code}
            filled.append(replace(end, status_from="launcher-log", **known))  # type: ignore[arg-type]  # int fields
        else:
            filled.append(end)
    return filled
