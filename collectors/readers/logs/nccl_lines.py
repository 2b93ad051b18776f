"""NCCL's own lines (NCCL_DEBUG=INFO, WARN and the "Last error" that torch repeats), 2.4 to 2.30.

In: the bare text of a line, in which several messages may be glued. Out: (kind, fields) of INFO
messages, of which only the first of each sort a process is kept (thousands of channels say one
thing). Failures are in nccl_failures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collectors.readers.logs.rule import rule, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = re.compile(
    r"(?P<host>[A-Za-z0-9][\w.-]{0,252}):(?P<pid>\d{1,10}):\d{1,10} \[(?P<device>-?\d{1,5})\] "
    r"(?:[\w./+-]+:\d+ (?:\([^)]{0,80}\) )?)?NCCL (?P<level>INFO|WARN|CALL|TRACE|VERSION) ?"
)
_SEEN = 100_000
"""Distinct INFO messages of one file that are told apart; more are left out."""


@dataclass(frozen=True)
class Header:
    """What stands before a message."""

    host: str
    pid: int
    device: int
    level: str

    @property
    def fields(self) -> dict[str, Any]:
        """As fields of an event."""
        return {"host": self.host, "pid": self.pid, "device": self.device}


def messages(text: str) -> Iterator[tuple[Header, str]]:
    """Every message of a line with its header."""
    found = list(_HEADER.finditer(text))
    ends = [*(f.start() for f in found[1:]), len(text)]
    for one, end in zip(found, ends, strict=False):
        header = Header(one["host"], int(one["pid"]), int(one["device"]), one["level"])
        yield header, text[one.end() : end].strip()


def header(text: str) -> Header | None:
    """The first header of a line."""
    return next((h for h, _ in messages(text)), None) if "NCCL " in text else None


def _devices(_text: str, out: dict[str, Any]) -> None:
    listed = re.findall(r"\[\d+\](?:\{[^}]*\})?([\w./-]+):(\d+)/(\w+)", str(out.pop("listed", "")))
    out["devices"] = [{"name": n, "port": int(p), "layer": layer} for n, p, layer in listed[:64]]


def _interfaces(_text: str, out: dict[str, Any]) -> None:
    listed = re.findall(r"\[\d+\]([\w.@-]+):(\S+?)(?:<\d+>)?(?=\s|$)", str(out.pop("listed", "")))
    out["interfaces"] = [{"name": n, "address": a} for n, a in listed[:64]]


def _channel(_text: str, out: dict[str, Any]) -> None:
    via = str(out.get("via", ""))
    parts = via.split("/")
    out["transport"] = parts[0]
    if parts[0] == "NET" and len(parts) > 2:
        out["network"] = parts[1]
        nic = re.match(r"(\d+)(?:\((\d+)\))?", parts[2])
        out["nic"] = int(nic[1]) if nic else None
        out["proxy"] = int(nic[2]) if nic and nic[2] else None
        out["gdr"] = "GDRDMA" in via


def _comm(text: str, out: dict[str, Any]) -> None:
    for name, pattern in (
        ("cuda_dev", r"cudaDev (\d+)"),
        ("nvml_dev", r"nvmlDev (\d+)"),
        ("nodes", r"nNodes (\d+)"),
        ("local_ranks", r"localRanks (\d+)"),
    ):
        hit = re.search(pattern, text)
        if hit:
            out[name] = whole(hit[1])
    for name, pattern in (("bus_id", r"busId (\w+)"), ("comm_id", r"commId (\w+)")):
        hit = re.search(pattern, text)
        if hit:
            out[name] = hit[1]


_INFO = (
    rule(
        "nccl-info.env",
        " set ",
        r"^(?P<name>NCCL_\w+) set (?:by environment )?to (?P<value>\S+?)\.?$",
    ),
    rule(
        "nccl-info.bootstrap",
        "Bootstrap",
        r"^Bootstrap ?: Using \[?(?:\d+\])?(?P<interface>[\w.@-]+):(?P<address>\S+?)(?:<\d+>)?$",
    ),
    rule("nccl-info.ib", "NET/IB", r"^NET/IB ?: Using (?P<listed>\[\d+\].*)", _devices),
    rule("nccl-info.ib", "NET/IB", r"^NET/IB ?: (?P<none>No device found)"),
    rule(
        "nccl-info.socket", "NET/Socket", r"^NET/Socket ?: Using (?P<listed>\[\d+\].*)", _interfaces
    ),
    rule("nccl-info.net", "Using network", r"^Using network (?P<network>.+)$"),
    rule(
        "nccl-info.gdr",
        "GPU Direct RDMA",
        r"GPU Direct RDMA (?:\([^)]*\) )?(?P<state>[Ee]nabled|[Dd]isabled) for "
        r"(?:HCA (?P<i_index>\d+) )?'?(?P<hca>[\w.:-]+)'?",
    ),
    rule(
        "nccl-info.channel",
        " via ",
        r"^Channel \d+(?:/\d+)? : (?P<i_source>\d+)\[\w+\] -> (?P<i_target>\d+)\[\w+\]"
        r"(?: \[(?P<way>send|receive)\])? via (?P<via>\S+)",
        _channel,
    ),
    rule(
        "nccl-info.comm",
        "nranks",
        r"(?:comm 0x[0-9a-f]+ )?rank (?P<i_comm_rank>\d+) nranks (?P<i_size>\d+)\b.*?"
        r"(?:- Init (?P<state>START|COMPLETE))?$",
        _comm,
    ),
    rule(
        "nccl-info.comm",
        "nRanks",
        r"comm 0x[0-9a-f]+ rank (?P<i_comm_rank>\d+) nRanks (?P<i_size>\d+)",
        _comm,
    ),
    rule("nccl-info.connected", "Connected all", r"^Connected (?P<what>all rings|all trees)"),
    rule("nccl-info.p2p-check", "Check P2P", r"isAllDirectP2p (?P<i_direct>\d)"),
    rule(
        "nccl-info.pcie",
        "PCI[",
        r"\+ PCI\[(?P<f_bandwidth>[\d.]+)\] - (?P<what>(?:GPU|NIC|PCI)/\S+)",
    ),
    rule(
        "nccl-info.system",
        "=== System",
        r"=== System : maxBw (?P<f_max>[\d.]+) totalBw (?P<f_total>[\d.]+)",
    ),
    rule(
        "nccl-info.graph",
        "Pattern ",
        r"^Pattern (?P<i_pattern>\d+), crossNic \d+, nChannels (?P<i_channels>\d+), "
        r"bw (?P<f_bandwidth>[\d.]+)/(?P<f_inter>[\d.]+), type (?P<paths>\S+?),",
    ),
)


_FAILURES_IN_INFO = ("NCCL WARN", "NET/OFI", "speed change", "P2P is disabled", "async", "MNNVL")
"""Words of INFO messages that RULES want."""


class Info:
    """INFO messages of one file, each sort a process once."""

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    def events(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(kind, fields) of what is new in this line."""
        for head, message in messages(text):
            if head.level not in ("INFO", "VERSION"):
                continue
            for one in _INFO:
                fields = one.fields(message)
                if fields is None:
                    continue
                key = (one.kind, head.host, head.pid, repr(fields))
                if key not in self.seen and len(self.seen) < _SEEN:
                    self.seen.add(key)
                    yield one.kind, {**head.fields, **fields}
                break


def only_info(text: str) -> bool:
    """Whether a line holds nothing but INFO messages that no other rule wants."""
    found = _HEADER.match(text)
    if found is None or found["level"] != "INFO":
        return False
    return not any(needle in text for needle in _FAILURES_IN_INFO)


def typed(text: str, fields: dict[str, Any]) -> None:
    """Adds host, pid and device of a failure line that has a header."""
    head = header(text)
    if head is not None:
        for name, value in head.fields.items():
            fields.setdefault(name, value)
