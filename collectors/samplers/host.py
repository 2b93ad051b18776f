"""The host: processor, memory, memory kills, disk; one row of table `hosts` a sample.

In: /proc, the cgroup, the file system of the run. Out: mappings in the words of `schema`.
What a machine does not say is None, never 0. A sample costs well under a millisecond.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from collectors.samplers import cgroup


def _cpu_times() -> tuple[int, int] | None:
    """(busy, all) ticks of all cores since boot."""
    try:
        with Path("/proc/stat").open(encoding="ascii", errors="replace") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    try:
        lines = Path("/proc/meminfo").read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


class HostSampler:
    """Samples of this host; remembers the previous one for the share of busy time."""

    def __init__(self, host: str, disk: Path) -> None:
        self._host = host
        self._disk = disk
        self._before = _cpu_times()

    def sample(self) -> dict[str, Any]:
        """One row of table `hosts`."""
        now, before = _cpu_times(), self._before
        self._before = now
        busy = None
        if now and before and now[1] > before[1]:
            busy = (now[0] - before[0]) / (now[1] - before[1])
        installed = meminfo()
        group = cgroup.memory()
        total = installed.get("MemTotal")
        used = None
        if total is not None and "MemAvailable" in installed:
            used = total - installed["MemAvailable"]
        if group.limit is not None and (total is None or group.limit < total):
            total, used = group.limit, group.used
        return {
            "host": self._host,
            "time_ns": time.time_ns(),
            "cpu": busy,
            "cores": len(os.sched_getaffinity(0)),
            "memory_used": used,
            "memory_total": total,
            "oom_kills": group.oom_kills,
            "disk_free": self._disk_free(),
        }

    def _disk_free(self) -> int | None:
        try:
            system = os.statvfs(self._disk)
        except OSError:
            return None
        return system.f_bavail * system.f_frsize


def facts(host: str, disk: Path) -> dict[str, Any]:
    """What a capture keeps of the host: load, memory, cgroup, disk, pressure."""
    info = meminfo()
    group = cgroup.memory()
    kept = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Shmem")
    pressure: dict[str, str | None] = {}
    for name in ("cpu", "memory", "io"):
        try:
            pressure[name] = Path(f"/proc/pressure/{name}").read_text("ascii", "replace").strip()
        except OSError:
            pressure[name] = None
    return {
        "time_ns": time.time_ns(),
        "host": host,
        "load": list(os.getloadavg()),
        "cores": len(os.sched_getaffinity(0)),
        "memory": {name: info.get(name) for name in kept},
        "cgroup": {"limit": group.limit, "used": group.used, "oom_kills": group.oom_kills},
        "disk": {"run": _space(disk), "/dev/shm": _space(Path("/dev/shm"))},  # noqa: S108 - where workers share memory
        "pressure": pressure,
    }


def _space(path: Path) -> dict[str, int] | None:
    try:
        system = os.statvfs(path)
    except OSError:
        return None
    return {
        "free": system.f_bavail * system.f_frsize,
        "total": system.f_blocks * system.f_frsize,
        "files_free": system.f_favail,
    }
