"""What NCCL's logs say of a job: processes, communicators, interfaces, NICs, channels.

In: Lines. Out: one Process for each host and pid, and views over them. Ranks are those of the
largest communicator a process is in, which is the whole job where every process has joined one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playbooks.lines import Event, Lines


@dataclass
class Process:
    """One process as its own lines describe it."""

    host: str
    pid: int
    rank: int | None = None
    size: int | None = None
    cuda_dev: int | None = None
    nvml_dev: int | None = None
    bus_id: str | None = None
    comm_id: str | None = None
    complete: bool = False
    comms: list[Event] = field(default_factory=list)
    channels: list[Event] = field(default_factory=list)

    @property
    def gpu(self) -> int | None:
        """The GPU's number on its host; its number in the process where that is all there is."""
        return self.nvml_dev if self.nvml_dev is not None else self.cuda_dev


class Nccl:
    """Views of all NCCL lines of a pile."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    @cached_property
    def processes(self) -> list[Process]:
        """Every process that wrote a NCCL line, by host and pid."""
        out: dict[tuple[str, int], Process] = {}

        def of(event: Event) -> Process | None:
            pid = event.number("pid")
            if pid is None or not event.text("host"):
                return None
            key = (event.text("host"), int(pid))
            return out.setdefault(key, Process(*key))

        for event in self.lines.of("nccl-info.bootstrap", "nccl-info.net", "nccl-info.ib"):
            of(event)
        for event in self.lines.of("nccl-info.comm"):
            process = of(event)
            if process is not None:
                _joined(process, event)
        for event in self.lines.of("nccl-info.channel"):
            process = of(event)
            if process is not None:
                process.channels.append(event)
        return [out[key] for key in sorted(out)]

    @cached_property
    def hosts(self) -> list[str]:
        """Hosts that wrote NCCL lines."""
        return sorted({p.host for p in self.processes})

    @cached_property
    def several_hosts(self) -> bool:
        """Whether the job is known to span hosts."""
        if len(self.hosts) > 1:
            return True
        if any((e.number("nodes") or 0) > 1 for e in self.lines.of("nccl-info.comm")):
            return True
        sent = self.lines.of("nccl-info.channel")
        return any(e.fields.get("transport") == "NET" for e in sent)

    @cached_property
    def of_rank(self) -> dict[int, Process]:
        """The process of each rank of the largest communicator."""
        largest = max((p.size or 0 for p in self.processes), default=0)
        return {p.rank: p for p in self.processes if p.rank is not None and p.size == largest}

    @cached_property
    def networks(self) -> dict[str, set[str]]:
        """Networks that NCCL said it uses, by host."""
        out: dict[str, set[str]] = defaultdict(set)
        for event in self.lines.of("nccl-info.net"):
            out[event.place].add(event.text("network"))
        return out

    @cached_property
    def devices(self) -> dict[str, list[tuple[str, str]]]:
        """(device, link layer) after "NET/IB : Using", by host."""
        out: dict[str, list[tuple[str, str]]] = {}
        for event in self.lines.of("nccl-info.ib"):
            listed = event.fields.get("devices")
            if isinstance(listed, list) and listed:
                out.setdefault(
                    event.place,
                    [(str(d.get("name")), str(d.get("layer"))) for d in listed],
                )
        return out

    @cached_property
    def started(self) -> bool:
        """Whether communicators came up: an end of an init, a channel over a net, or rings."""
        return any(p.complete for p in self.processes) or bool(self.lines.of("nccl-info.connected"))

    @cached_property
    def env(self) -> dict[str, dict[str, Event]]:
        """Variables that NCCL or a script said are set: name -> place -> line."""
        out: dict[str, dict[str, Event]] = defaultdict(dict)
        for event in self.lines.of("nccl-info.env", "launch.env"):
            out[event.text("name")].setdefault(event.place, event)
        return out

    def value(self, name: str) -> tuple[str, Event] | None:
        """The value of a variable on any host."""
        for event in self.env.get(name, {}).values():
            return event.text("value"), event
        return None


def _joined(process: Process, event: Event) -> None:
    size = event.number("size")
    process.comms.append(event)
    process.complete = process.complete or event.text("state") == "COMPLETE"
    if size is None or (process.size or 0) > size:
        return
    rank = event.number("comm_rank")
    process.size = int(size)
    process.rank = None if rank is None else int(rank)
    for name in ("cuda_dev", "nvml_dev"):
        value = event.number(name)
        if value is not None:
            setattr(process, name, int(value))
    process.bus_id = event.text("bus_id") or process.bus_id
    process.comm_id = event.text("comm_id") or process.comm_id
