"""What is taken from outside when a job is stuck: stacks twice, /proc twice, the host.

In: the ranks of this host. Out: files of one folder `captures/NNNN-hang/` (stacks-0.json,
stacks-1.json, proc.json, host.json). The job is not asked for anything and not changed; a rank that
cannot be looked at gets a `problem` instead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from collectors.samplers import host, proc, stacks
from diag import rundir

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def _stacks(pids: Mapping[int, int]) -> dict[str, Any]:
    at = time.time_ns()
    dumps = stacks.dump_all(list(pids.values()))
    ranks = [{"rank": rank, **dump} for rank, dump in zip(pids, dumps, strict=True)]
    return {"time_ns": at, "ranks": ranks}


def _proc(pids: Mapping[int, int]) -> dict[str, Any]:
    at = time.time_ns()
    return {
        "time_ns": at,
        "ranks": [{"rank": rank, **proc.facts(pid)} for rank, pid in pids.items()],
    }


def _with_progress(first: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The later look, with the share of one core that each rank used in between.

    cpu_share = (cpu_s later - cpu_s first) / seconds between
    """
    seconds = (later["time_ns"] - first["time_ns"]) / 1e9
    for before, after in zip(first["ranks"], later["ranks"], strict=True):
        used = None
        if before["cpu_s"] is not None and after["cpu_s"] is not None and seconds > 0:
            used = round((after["cpu_s"] - before["cpu_s"]) / seconds, 4)
        after["cpu_share"] = used
    later["seconds_between"] = round(seconds, 3)
    return later


def take(folder: Path, pids: Mapping[int, int], host_name: str, apart: float) -> None:
    """Fill `folder` for `pids` (rank -> process id), the two looks `apart` seconds apart.

    Raises OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first_proc = _proc(pids)
    began = time.monotonic()
    rundir.write_json(folder / "stacks-0.json", _stacks(pids))
    time.sleep(max(0.0, apart - (time.monotonic() - began)))
    rundir.write_json(folder / "proc.json", _with_progress(first_proc, _proc(pids)))
    rundir.write_json(folder / "stacks-1.json", _stacks(pids))
    rundir.write_json(folder / "host.json", host.facts(host_name, folder))
