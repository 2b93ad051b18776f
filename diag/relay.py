"""Carries a job's output to where diag's own output goes, and keeps a bounded copy of it.

Runs as a process of its own (`python -I -S relay.py IN:OUT:COPY …`), so that the job keeps printing
when the supervisor is killed. IN and OUT are file descriptors, COPY is a file or empty. It imports
nothing of the project, changes no byte, and ends when every writer has closed its end.

It lives in the job's process group with all signals blocked. That makes it a witness: a signal that
is pending here went to the whole group, so the job has it already (see diag/streams.py). Real-time
signal SIGRTMIN + n makes it forget signal n; SIGWINCH makes it hand the terminal's size to the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import threading
from pathlib import Path

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 65536
HEAD = 1 << 20
"""Bytes of the beginning that are always kept."""
TAIL = 4 << 20
"""Bytes of the end that survive a cut."""
LIMIT = 8 << 20
"""Size at which a copy is cut to its head and its tail."""

WITNESSED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)
FORGET = {signal.SIGRTMIN + number: number for number in WITNESSED}
CONTROL = frozenset({signal.SIGURG, signal.SIGWINCH, *FORGET})
"""What the relay waits for; SIGURG it sends to itself when a stream has ended."""


class Copy:
    """An append-only copy that never outgrows LIMIT, and gives up for good on the first error."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._total = 0
        self._head = 0
        self._fd = -1
        if path:
            self._guarded(self._open)

    def write(self, data: bytes) -> None:
        """Append `data`; a full disk or a folder that is gone ends the copy, not the relay."""
        if self._fd >= 0:
            self._guarded(lambda: self._append(data))

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._total = self._total or self._size

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size += len(data)
        self._total += len(data)
        if self._size > LIMIT:
            self._cut()

    def _cut(self) -> None:
        """Rewrite as head, one line that says how much is left out, tail."""
        if self._head == 0:
            first = os.pread(self._fd, HEAD, 0)
            self._head = first.rfind(b"\n") + 1 or len(first)
        head = os.pread(self._fd, self._head, 0)
        tail = os.pread(self._fd, TAIL, self._size - TAIL)
        tail = tail[tail.find(b"\n") + 1 :]
        dropped = self._total - len(head) - len(tail)
        note = b"[... %d bytes left out by diag ...]\n" % dropped
        fresh = Path(self._path + ".new")
        fresh.write_bytes(head + note + tail)
        os.close(self._fd)
        self._fd = -1
        fresh.replace(self._path)
        self._open()


def deliver(out: int, data: bytes) -> bool:
    """Write all of `data`; False when the reader is gone. Any other error drops the bytes.

    A dead terminal or a full disk behind OUT must not stop the job, so only a broken pipe counts:
    that one the job would have met as well.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(out, view) :]
        except BlockingIOError:
            select.select([], [out], [])
        except BrokenPipeError:
            return False
        except OSError:
            return True
    return True


def pump(source: int, out: int, copy: Copy) -> None:
    """Relay one stream until its end."""
    while True:
        try:
            data = os.read(source, CHUNK)
        except OSError:  # EIO: the last process that held the pseudo-terminal is gone
            break
        if not data:
            break
        alive = deliver(out, data)
        copy.write(data)
        if not alive:
            break
    os.close(source)  # with the reader gone, the job now gets SIGPIPE, as it would without us


def follow_size(source: int, out: int) -> None:
    """Hand the terminal's size on; does nothing for a pipe."""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(out, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(source, termios.TIOCSWINSZ, size)


def main(arguments: list[str]) -> None:
    """Relay every `IN:OUT:COPY` of `arguments`; returns when all have ended."""
    streams = []
    for argument in arguments:
        reads, writes, path = argument.split(":", 2)
        streams.append((int(reads), int(writes), Copy(path)))
    left = [len(streams)]
    lock = threading.Lock()

    def run(source: int, out: int, copy: Copy) -> None:
        pump(source, out, copy)
        with lock:
            left[0] -= 1
        os.kill(os.getpid(), signal.SIGURG)

    signal.pthread_sigmask(signal.SIG_BLOCK, WITNESSED | CONTROL)
    for stream in streams:
        threading.Thread(target=run, args=stream, daemon=True).start()
    while left[0]:
        got = signal.sigwaitinfo(CONTROL).si_signo
        if got == signal.SIGWINCH:
            for source, out, _ in streams:
                follow_size(source, out)
        elif got in FORGET:
            signal.sigtimedwait({FORGET[got]}, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
