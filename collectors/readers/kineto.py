"""Kineto traces (Chrome JSON of torch.profiler), one rank a file, read in a stream.

In: the JSON object of any era (categories "Kernel", "kernel"; times in us, absolute or relative to
baseTimeNanoseconds; process-group arguments or none). Out: rows of `steps`, of `phases` (data), and
one log_events row of kind kineto.rank {rank, world, steps, step_us, data_us, compute_us, device_us
(see kineto_kernels), gaps_us (see kineto_gaps), messages (see kineto_messages), groups {process
group|operation: [duration in us, ...]}}. Memory does not grow with the file but for a few bytes a
kernel.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from collectors.collected import Reading, Source
from collectors.readers.kineto_gaps import Gaps
from collectors.readers.kineto_kernels import COMMUNICATION, COMPUTE, MEMORY, Kernels, communicates
from collectors.readers.kineto_messages import Messages
from collectors.readers.kineto_stream import Stream

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact

KIND = "kineto"
_KERNELS = 20_000
"""Communication kernels whose durations are kept."""
_NCCL = re.compile(r"nccl(?:Sym|Dev)?\w*?(?:Kernel)?_(?:Sym\w+?_)?(\w+?)(?:_|\(|$)", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep#(\d{1,12})$")

_CATEGORIES = {
    **dict.fromkeys(("kernel", "Kernel"), "kernel"),
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset", "memcpy", "memset"), "copy"),
    **dict.fromkeys(
        ("user_annotation", "python_annotation", "cpu_op", "Operator", "operator"), "annotation"
    ),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime"), "call"),
}


def sniff(head: bytes) -> bool:
    """A JSON object with trace events, or with the metadata that precedes them."""
    if not head.lstrip().startswith(b"{"):
        return False
    return b'"traceEvents"' in head or (b'"schemaVersion"' in head and b'"deviceProp' in head)


class _Rank:
    """What is kept of one rank."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[float, float]] = {}
        self.data: list[tuple[float, float]] = []
        self.groups: dict[str, list[float]] = defaultdict(list)
        self.kernels = Kernels()
        self.gaps = Gaps()
        self.messages = Messages()
        self.kept = 0

    def feed(self, event: dict[str, Any]) -> None:
        """One event; most are of a category that nothing is taken from."""
        category = event.get("cat")
        known = _CATEGORIES.get(category) if isinstance(category, str) else None
        if known is None or event.get("ph") != "X":
            return
        length, name = event.get("dur"), event.get("name")
        start = _float(event.get("ts"))
        if start is None or not isinstance(name, str) or not isinstance(length, int | float):
            return
        if known == "kernel":
            self._kernel(event, name, start, float(length))
        elif known == "copy":
            self.kernels.add(MEMORY, start, float(length))
            self.messages.copy(name, float(length))
        elif known == "call":
            self.gaps.call(name, start, event.get("args"))
        else:
            self._annotation(name, start, float(length))

    def _annotation(self, name: str, start: float, length: float) -> None:
        step = _STEP.match(name) if name.startswith("Pro") else None
        if step and len(self.steps) < _KERNELS:
            self.steps.setdefault(int(step.group(1)), (start, length))
        elif name == "aten::item":
            self.gaps.items += 1
        elif "DataLoader" in name and "__next__" in name and len(self.data) < _KERNELS:
            self.data.append((start, length))

    def _kernel(self, event: dict[str, Any], name: str, start: float, length: float) -> None:
        comm = communicates(name)
        self.gaps.kernel(start, length, event.get("args"), comm=comm)
        if not comm:
            self.kernels.add(COMPUTE, start, length)
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        found = _NCCL.match(name)
        op = str(args.get("Collective name") or (found.group(1) if found else name))[:60]
        group = str(args.get("Process Group Name", ""))[:60]
        self.kernels.add(COMMUNICATION, start, length, f"{group}|{op}")
        self.messages.collective(op, start, args)
        if self.kept < _KERNELS:
            self.kept += 1
            self.groups[f"{group}|{op}"].append(round(length, 3))


def _float(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def read(artifact: Artifact) -> Reading:
    """Steps, waits for data and communication kernels of one rank."""
    problems: list[str] = []
    stream = Stream(artifact, problems)
    with stream.stream:
        head = stream.head()
        rank = _Rank()
        for event in stream.events():
            rank.feed(event)
    reading = Reading(Source(artifact.path, KIND, "all"))
    info = head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    number, world = info.get("rank"), info.get("world_size")
    own = number if isinstance(number, int) and 0 <= number < 2**24 else _named(artifact.path)
    if own is None:
        problems.append("neither the trace nor its name says which rank it is")
    if isinstance(world, int) and 0 < world < 2**24:
        reading.world_size = world
    _rows(reading, rank, own, head)
    part = "part" if any("break" in p for p in problems) else "all"
    reading.source = Source(artifact.path, KIND, part, tuple(problems))
    return reading


def _named(path: str) -> int | None:
    found = re.search(r"rank[_.-]?(\d{1,7})", path.rsplit("/", 1)[-1])
    return int(found.group(1)) if found else None


def _rows(reading: Reading, rank: _Rank, own: int | None, head: dict[str, Any]) -> None:
    base = head.get("baseTimeNanoseconds")
    base = base if isinstance(base, int) and 0 <= base < 2**62 else 0

    def at(us: float) -> int:
        return base + round(min(max(us, 0.0), 2.0**52) * 1000)

    inside = 0.0
    for step, (start, length) in sorted(rank.steps.items()):
        reading.add("steps", rank=own, step=step, start_ns=at(start), end_ns=at(start + length))
        for begin, waited in rank.data:
            if start <= begin < start + length:
                inside += waited
                reading.add(
                    "phases",
                    rank=own,
                    step=step,
                    phase="data",
                    start_ns=at(begin),
                    end_ns=at(begin + waited),
                )
    device = rank.kernels.breakdown()
    compute = device["compute"] if device else 0.0
    fields = {
        "rank": own,
        "steps": len(rank.steps),
        "step_us": round(sum(n for _, n in rank.steps.values()), 3),
        "data_us": round(inside, 3),
        "compute_us": compute,
        "device_us": device,
        "gaps_us": rank.gaps.numbers(),
        "messages": rank.messages.numbers(rank.steps),
        "groups": dict(rank.groups),
    }
    total = sum(sum(v) for v in rank.groups.values())
    host = head.get("host_name")
    reading.add(
        "log_events",
        rank=own,
        host=host[:200] if isinstance(host, str) else None,
        source=reading.source.path,
        locator="traceEvents",
        kind="kineto.rank",
        fields=json.dumps(fields),
        quote=f"{len(rank.steps)} steps; {rank.kept} communication kernels of {total / 1e3:.1f} ms"
        f", compute kernels of {compute / 1e3:.1f} ms, data {inside / 1e3:.1f} ms",
    )
