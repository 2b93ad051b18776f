"""What the kernel said during a run: memory kills, crashes, GPU, PCIe and link messages.

In: /dev/kmsg, or `dmesg` where only that is allowed. Out: lines as dmesg prints them, those alone
that tell something about a job, or the reason why the log cannot be read.
"""

from __future__ import annotations

import os
import re
import subprocess
import time

TELLING = re.compile(
    r"oom-kill:|Out of memory|out of memory: Killed|Killed process|oom_reaper|invoked oom-killer"
    r"|NVRM|Xid|SXid|nvidia|segfault at|general protection|traps:|Machine Check|mce:|EDAC"
    r"|AER:|PCIe Bus Error|mlx[45]_|Link (?:is )?[Dd]own|I/O error|I/O timeout|not responding"
    r"|blocked for more than \d+ seconds|hung_task|No space left",
)
LIMIT = 1000
"""Lines kept at most: the last ones."""


def parse_kmsg(record: str) -> tuple[float, str] | None:
    """(seconds since boot, text) of one /dev/kmsg record, such as `6,339,5140900,-;text`."""
    prefix, found, text = record.partition(";")
    fields = prefix.split(",")
    if not found or len(fields) < 3 or not fields[2].isdigit():
        return None
    return int(fields[2]) / 1e6, text.split("\n", 1)[0]


def _kmsg() -> list[tuple[float, str]]:
    """All records the kernel still holds; OSError when we may not look."""
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found: list[tuple[float, str]] = []
    try:
        while True:
            try:
                record = os.read(fd, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                return found
            except BrokenPipeError:
                continue  # overwritten while we read: the next read gives the oldest one left
            if (parsed := parse_kmsg(record)) is not None:
                found.append(parsed)
    finally:
        os.close(fd)


def _dmesg() -> list[tuple[float, str]]:
    """The same through the dmesg command; OSError when it is not there or refuses."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=10, check=False)
    except subprocess.TimeoutExpired as slow:
        raise OSError("dmesg gave no answer within 10 s") from slow
    if done.returncode != 0:
        raise OSError(done.stderr.decode("utf-8", "replace").strip() or "dmesg failed")
    found = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        match = re.match(r"\[\s*(\d+\.\d+)\]\s?(.*)", line)
        if match:
            found.append((float(match[1]), match[2]))
    return found


def since(boot_s: float) -> tuple[list[str], str | None]:
    """(telling lines since `boot_s` seconds after boot, None) or ([], why there are none).

    `boot_s` is on the kernel log's clock: `now()`.
    """
    try:
        records = _kmsg()
    except OSError:
        try:
            records = _dmesg()
        except OSError as wrong:
            return [], f"kernel log not readable: {wrong}"
    lines = [
        f"[{at:12.6f}] {text}" for at, text in records if at >= boot_s and TELLING.search(text)
    ]
    return lines[-LIMIT:], None


def now() -> float:
    """The kernel log's clock: seconds since boot, without time asleep."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
