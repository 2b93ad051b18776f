"""Rates that benchmarks and programs reached, and what the hardware offers for them.

In: Evidence. Out: measured rates with their lines, GB/s; rates of GPUs' NVLinks and hosts' NICs by
model and port. A table of nccl-tests counts by its largest messages: small ones measure latency.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.lines import Event

NVLINK = (
    (re.compile(r"\bG?B[23]00\b"), 900.0),
    (re.compile(r"\bH(?:100|200|800)\b(?!.*PCIe)|\bGH200\b"), 450.0),
    (re.compile(r"\bA(?:100|800)\b(?!.*PCIe)"), 300.0),
    (re.compile(r"\bV100\b(?!.*PCIe)"), 150.0),
)
"""GB/s of all NVLinks of one GPU, one direction, by model (data sheets of the SXM parts)."""
LARGE = 1 << 26
"""Bytes of a message from which a collective measures bandwidth."""


@dataclass(frozen=True)
class Rate:
    """A rate that was reached."""

    rate: float
    event: Event


def tables(evidence: Evidence) -> list[Rate]:
    """The best large message of every table of nccl-tests."""
    best: dict[tuple[str, float], Rate] = {}
    for event in evidence.lines.of("nccl.bench"):
        size, rate = event.number("size"), event.number("busbw")
        if size is None or rate is None or size < LARGE:
            continue
        key = (str(event.row["source"]), event.number("table") or 0)
        if key not in best or rate > best[key].rate:
            best[key] = Rate(rate, event)
    return list(best.values())


def reached(evidence: Evidence) -> Rate | None:
    """The best rate of any table."""
    return max(tables(evidence), key=lambda r: r.rate, default=None)


def lowest(evidence: Evidence) -> Rate | None:
    """The rate of the slowest table."""
    return min(tables(evidence), key=lambda r: r.rate, default=None)


def bench_hosts(evidence: Evidence) -> dict[str, list[Event]]:
    """Ranks of nccl-tests by host."""
    out: dict[str, list[Event]] = {}
    for event in evidence.lines.of("nccl.bench-rank"):
        out.setdefault(event.text("host"), []).append(event)
    return out


def nvlink_rate(name: str) -> float | None:
    """GB/s of a model's NVLinks; None for models without, or unknown ones."""
    return next((rate for pattern, rate in NVLINK if pattern.search(name)), None)


def nic_rate(evidence: Evidence) -> float | None:
    """GB/s of the NICs that NCCL uses on one host, where ports or a platform tell their rate."""
    nccl = evidence.nccl
    ports = {(e.host, e.text("device")): e.number("rate") for e in evidence.lines.of("ib.port")}
    for host, devices in sorted(nccl.devices.items()):
        rates = [ports.get((host, name)) or ports.get((None, name)) for name, _ in devices]
        if rates and all(rates):
            return sum(r or 0.0 for r in rates) / 8
    for event in evidence.lines.of("nccl.ofi-provider"):
        count = re.search(r"found (\d{1,3}) nics", event.item.quote)
        if count and event.text("provider") == "efa":
            return int(count[1]) * _EFA
    return None


_EFA = 12.5
"""GB/s of one EFA device of p4 and p5 hosts, 100 Gb/s (AWS, EFA documentation)."""


def sound(evidence: Evidence) -> str | None:
    """That every table of nccl-tests is right and about as fast as its machines; None otherwise."""
    found = tables(evidence)
    ended = [e for e in evidence.lines.of("nccl.bench-end") if e.fields.get("ok") is not None]
    wrong = [e for e in evidence.lines.of("nccl.bench") if e.fields.get("wrong")]
    if not found or not ended or wrong or not all(e.fields["ok"] for e in ended):
        return None
    if evidence.lines.of("train.step"):
        return None  # a job's own steps say more of it than a test of its network
    hosts = bench_hosts(evidence)
    several = len(hosts) > 1 or evidence.nccl.several_hosts
    names = {e.text("name") for e in evidence.lines.of("nccl.bench-rank", "gpu.bus")} - {""}
    rates = {nvlink_rate(n) for n in names}
    inside = rates.pop() if len(rates) == 1 else None
    offered = nic_rate(evidence) if several else inside
    if offered is None or min(r.rate for r in found) < SOUND * offered:
        return None
    worst = min(found, key=lambda r: r.rate)
    return (
        f"nccl-tests ended without a wrong value and reached {worst.rate:.4g} GB/s, "
        f"{worst.rate / offered:.0%} of the {offered:.4g} GB/s that the "
        f"{'NICs of a host' if several else 'NVLinks of a GPU'} offer; nothing wrong in what was "
        "given."
    )


SOUND = 0.7
"""Share of the hardware's rate that large messages reach on a sound machine."""
