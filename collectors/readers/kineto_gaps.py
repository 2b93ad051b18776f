"""Why a device waited: whether each kernel was launched in time, and how kernels follow each other.

In: kernels (with their correlation) and calls of the CUDA runtime of one trace, in any order;
memory is a few bytes for each. Out, in microseconds where it is time:

    late       idle before kernels that were launched only after the device had run dry
    kernel     the median computing kernel
    comm_runs  stretches of communication kernels with no computing kernel begun between them
    syncs      calls that wait for the device; items: values read back (aten::item)
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

_MOST = 5_000_000
"""More kernels, or launches, of one trace are not kept."""


class Gaps:
    """Kernels and launches of one rank."""

    def __init__(self) -> None:
        self.start, self.end = array("d"), array("d")
        self.comm, self.number = array("B"), array("q")
        self.launched, self.launch = array("d"), array("q")
        self.syncs = 0
        self.items = 0

    def kernel(self, start: float, length: float, args: object, *, comm: bool) -> None:
        """One kernel."""
        if len(self.start) < _MOST:
            self.start.append(start)
            self.end.append(start + length)
            self.comm.append(comm)
            self.number.append(_correlation(args))

    def call(self, name: str, start: float, args: object) -> None:
        """One call of the runtime."""
        if "Synchronize" in name:
            self.syncs += 1
        elif "Launch" in name and len(self.launch) < _MOST:
            self.launched.append(start)
            self.launch.append(_correlation(args))

    def numbers(self) -> dict[str, Any] | None:
        """The sums; None without kernels."""
        if not self.start:
            return None
        start = np.array(self.start)
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.array(self.end)[order]
        comm, number = np.array(self.comm)[order].astype(bool), np.array(self.number)[order]
        compute = (end - start)[~comm]
        runs = comm & ~np.concatenate([[False], comm[:-1]])
        return {
            "late": round(self._late(start, end, number), 3),
            "kernel": round(float(np.median(compute)), 3) if compute.size else 0.0,
            "comm_kernels": int(comm.sum()),
            "comm_runs": int(runs.sum()),
            "syncs": self.syncs,
            "items": self.items,
        }

    def _late(self, start: Any, end: Any, number: Any) -> float:
        """Idle time before kernels that the host launched too late."""
        launch = np.array(self.launch)
        if not launch.size or start.size < 2:
            return 0.0
        order = np.argsort(launch, kind="stable")
        launch, when = launch[order], np.array(self.launched)[order]
        place = np.minimum(np.searchsorted(launch, number[1:]), launch.size - 1)
        known = (launch[place] == number[1:]) & (number[1:] >= 0)
        reach = np.maximum.accumulate(end)[:-1]
        gap = start[1:] - reach
        return float(gap[known & (gap > 0) & (when[place] >= reach - 1.0)].sum())


def _correlation(args: object) -> int:
    found = args.get("correlation") if isinstance(args, dict) else None
    return found if isinstance(found, int) and 0 <= found < 2**62 else -1
