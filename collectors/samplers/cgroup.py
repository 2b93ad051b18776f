"""Memory limit and memory kills of this process's cgroup, version 1 or 2.

In: /proc/self/cgroup and /sys/fs/cgroup. Out: integers, None where the kernel does not say.
A container often sees its own group as the root of the mount, so the root is tried as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class Memory:
    """Bytes and counts; each None when unknown (a limit of None: there is none)."""

    limit: int | None
    used: int | None
    """Without the page cache that can be dropped at once."""
    oom_kills: int | None
    """Processes that the kernel killed for memory since the group was made."""


@cache
def _group() -> tuple[int, Path] | None:
    """(version, folder with the memory files), or None."""
    try:
        lines = Path("/proc/self/cgroup").read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    named: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            named[controller] = path.lstrip("/")
    for version, base, controller, file in (
        (1, ROOT / "memory", "memory", "memory.limit_in_bytes"),
        (2, ROOT, "", "memory.events"),
    ):
        if controller not in named:
            continue
        for folder in (base / named[controller], base):
            if (folder / file).is_file():
                return version, folder
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None  # "max", or a file this kernel lacks


def _pairs(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0]: int(w[1]) for w in words if len(w) == 2 and w[1].isdigit()}


def memory() -> Memory:
    """What the group says now."""
    group = _group()
    if group is None:
        return Memory(None, None, None)
    version, folder = group
    stat = _pairs(folder / "memory.stat")
    if version == 1:
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        idle = stat.get("total_inactive_file", 0)
        kills = _pairs(folder / "memory.oom_control").get("oom_kill")
    else:
        chain = [f for f in (folder, *folder.parents) if f.is_relative_to(ROOT)]
        limits = [n for f in chain if (n := _number(f / "memory.max")) is not None]
        limit = min(limits, default=None)
        used = _number(folder / "memory.current")
        idle = stat.get("inactive_file", 0)
        kills = _pairs(folder / "memory.events").get("oom_kill")
    if limit is not None and limit >= _NO_LIMIT:
        limit = None
    return Memory(limit, None if used is None else max(0, used - idle), kills)
