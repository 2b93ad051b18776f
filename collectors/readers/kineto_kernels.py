"""What a device did, from the kernels of one trace: computing, communicating, copying, idling.

In: kernels and copies, one at a time; memory is a few bytes for each. Out: microseconds that sum to
the span from the first to the last of them:

    compute     some computing kernel runs
    exposed     communication runs and no computing kernel does
    memory      copies or fills run, and neither of the two
    idle        nothing runs

Classes by name, after the kernels of NCCL up to 2.30, RCCL, oneCCL, NVSHMEM and custom all-reduce
kernels; copies by category. Whatever else runs is computing.
"""

from __future__ import annotations

import re
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from collectors.readers import intervals

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

COMPUTE, COMMUNICATION, MEMORY = 0, 1, 2
_COMMUNICATES = re.compile(
    r"^nccl|^rccl|ncclKernel|ncclDevKernel|ncclSymk|nvshmem|^oneccl|mscclpp|cross_device_reduce|"
    r"one_shot_all_?reduce|two_shot_all_?reduce|multimem_|^deep_ep|::deep_ep::",
    re.IGNORECASE,
)
_MOST = 20_000_000
"""More kernels of one trace are counted, not kept."""
_GROUPS = 4096
"""More groups and operations of one trace share the last entry."""


@lru_cache(maxsize=1 << 14)
def communicates(name: str) -> bool:
    """Whether a kernel of this name moves data between ranks."""
    return bool(_COMMUNICATES.search(name))


class Kernels:
    """All kernels of a trace."""

    def __init__(self) -> None:
        self.start, self.end = array("d"), array("d")
        self.kind, self.group = array("B"), array("H")
        self.groups: dict[str, int] = {}
        self.left_out = 0

    def add(self, kind: int, start: float, length: float, group: str = "") -> None:
        """One kernel or copy; `group` names group and operation of communication."""
        if len(self.start) >= _MOST:
            self.left_out += 1
            return
        if group not in self.groups and len(self.groups) < _GROUPS:
            self.groups[group] = len(self.groups)
        self.start.append(start)
        self.end.append(start + length)
        self.kind.append(kind)
        self.group.append(self.groups.get(group, _GROUPS - 1))

    def breakdown(self) -> dict[str, Any] | None:
        """Microseconds of each part, None without kernels; by_group {group: {busy, exposed}}."""
        if not self.start:
            return None
        start, end = np.array(self.start), np.array(self.end)
        kind, group = np.array(self.kind), np.array(self.group)

        def of(chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
            return start[chosen], end[chosen]

        compute, moves = of(kind == COMPUTE), of(kind == COMMUNICATION)
        busy = intervals.length(*of(kind != MEMORY))
        computing = intervals.length(*compute)
        span = float(end.max() - start.min())
        every = intervals.length(start, end)
        communicating = intervals.length(*moves)
        exposed = busy - computing
        by_group = {}
        for name, number in self.groups.items():
            mine = of((group == number) & (kind == COMMUNICATION))
            if mine[0].size:
                by_group[name] = {
                    "count": int(mine[0].size),
                    "busy": round(intervals.length(*mine), 3),
                    "exposed": round(intervals.outside(mine, compute), 3),
                }
        parts = {
            "span": span,
            "compute": computing,
            "exposed": exposed,
            "memory": every - busy,
            "idle": span - every,
            "communication": communicating,
            "overlapped": communicating - exposed,
        }
        out: dict[str, Any] = {name: round(max(0.0, value), 3) for name, value in parts.items()}
        return out | {"kernels": len(self.start), "by_group": by_group}
