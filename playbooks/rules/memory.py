"""Out-of-memory errors, read as a sum, as far as the message decides.

In: memory errors that ranks raised, host samples. Out: oom.oversized-request, oom.fragmentation or
oom.artificial-limit when the arithmetic of the message says so; oom.activations at most possible
when only the frame hints; else a context finding, since one message does not separate the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playbooks.finding import Finding, Item
from playbooks.rules import memory_causes, memory_library, memory_stages
from playbooks.rules.common import frames, is_after_the_fact, own_frame, where_was
from playbooks.words import ranks_words, size

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.facts import Raised
    from playbooks.policy import Policy

_UNITS = {"bytes": 0, "b": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4, "pib": 5, "eib": 6}
_SIZE = r"([\d.]+) ?([KMGTPE]iB|bytes)"
_PATTERNS = {
    "request": (
        r"tried to allocate " + _SIZE,
        r"Unable to allocate " + _SIZE,
    ),
    "total": (r"total capacity of " + _SIZE, _SIZE + r" total capacity"),
    "free": (r"of which " + _SIZE + r" is free", _SIZE + r" free"),
    "allocated": (_SIZE + r" is allocated by PyTorch", _SIZE + r" already allocated"),
    "idle": (_SIZE + r" is reserved by PyTorch but unallocated",),
    "reserved": (_SIZE + r" reserved in total by PyTorch",),
    "in_use": (r"this process has " + _SIZE + r" memory in use",),
}


@dataclass(frozen=True)
class Message:
    """The sizes that an out-of-memory message states, bytes; None where it does not."""

    request: int | None
    total: int | None
    free: int | None
    allocated: int | None
    idle: int | None
    """Reserved by the allocator but not in use."""
    host: bool
    """Whether host memory was asked for."""
    in_use: int | None = None
    """What this process holds of the device, torch's memory and the rest."""

    @property
    def outside(self) -> int | None:
        """What this process holds beside torch's allocator: context, libraries, NCCL."""
        if self.in_use is None or self.allocated is None:
            return None
        return self.in_use - self.allocated - (self.idle or 0)


def parse(text: str) -> Message:
    """The numbers in an out-of-memory message of torch (old and new words), numpy or Python."""
    found: dict[str, int] = {}
    for name, patterns in _PATTERNS.items():
        for pattern in patterns:
            hit = re.search(pattern, text, re.IGNORECASE)
            if hit:
                found[name] = int(float(hit[1]) * 1024 ** _UNITS[hit[2].lower()])
                break
    idle = found.get("idle")
    if idle is None and "reserved" in found and "allocated" in found:
        idle = max(0, found["reserved"] - found["allocated"])
    device = re.search(r"CUDA|HIP|GPU|OutOfMemoryError", text) is not None
    return Message(
        found.get("request"),
        found.get("total"),
        found.get("free"),
        found.get("allocated"),
        idle,
        not device,
        found.get("in_use"),
    )


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """One finding for the earliest out-of-memory error."""
    found = [
        r
        for r in evidence.raised
        if r.kind.name == "memory" and not is_after_the_fact(evidence, policy, r.at_ns)
    ]
    if not found:
        return memory_library.library(evidence, policy)
    first = found[0]
    alike = [
        r
        for r in found
        if r.text == first.text or parse(r.text).request == parse(first.text).request
    ]
    ranks = tuple(sorted({r.rank for r in alike if r.rank is not None}))
    return [_decide(evidence, policy, first, ranks)]


def _host_total(evidence: Evidence, host: str | None) -> int | None:
    """Memory of the host (or its cgroup's limit), from samples."""
    totals = [
        row["memory_total"]
        for row in evidence.collected.rows("hosts")
        if row["memory_total"] and (host is None or row["host"] in (None, host))
    ]
    return max(totals) if totals else None


def _decide(evidence: Evidence, policy: Policy, first: Raised, ranks: tuple[int, ...]) -> Finding:
    message = parse(first.text)
    who = ranks_words(ranks, capital=True) if ranks else "A rank"
    place = own_frame(first.traceback)
    where = (where_was(evidence, ranks[0]) if len(ranks) == 1 else "") + (
        f" at {place}" if place else ""
    )
    asked = f"{who} asked for {size(message.request)}" if message.request else f"{who} ran out"
    asked += where
    total = message.total or (_host_total(evidence, first.host) if message.host else None)
    base = Finding(
        "oom.oversized-request",
        "root",
        "certain",
        "",
        ranks=ranks,
        evidence=(first.item, *([Item(first.item.source, "traceback", place)] if place else ())),
        at_ns=first.at_ns,
    )
    pinned = memory_causes.pinned(base, first, asked)
    if pinned is not None:
        return pinned
    if message.request and total and message.request > policy.outlier_request * total:
        owner = "its host" if message.host else "its device"
        return base.but(
            summary=f"{asked}, more than the {size(total)} that {owner} has in all.",
            formula=f"request {size(message.request)} > total {size(total)}",
            excluded=(
                ("oom.activations", "no neighbouring step needs anything like it"),
                ("oom.fragmentation", "no memory, however whole, could serve it"),
            ),
        )
    if message.request and message.request >= policy.absurd_request:
        return base.but(
            summary=f"{asked}, more than any single device or process needs.",
            confidence="likely",
            formula=f"request {size(message.request)} >= {size(policy.absurd_request)}",
        )
    if message.host or not message.request or message.free is None:
        return _undecided(base, f"{asked} of memory; the message does not say what filled it.")
    return _device(evidence, base, policy, message, first, asked)


def _device(
    evidence: Evidence, base: Finding, policy: Policy, message: Message, first: Raised, asked: str
) -> Finding:
    """What the sum of a device's message decides, and else its frames, pids and history."""
    narrow = memory_causes.decide(evidence, policy, base, message, first, asked)
    narrow = narrow or memory_stages.decide(evidence, policy, base, message, asked)
    if narrow is not None:
        return narrow
    request, free, idle = message.request or 0, message.free or 0, message.idle
    if idle is not None and idle >= request > free:
        return base.but(
            cause="oom.fragmentation",
            confidence="likely",
            summary=f"{asked} with {size(free)} free, while {size(idle)} were reserved but unused.",
            formula=f"reserved but unallocated {size(idle)} >= request {size(request)} > free "
            f"{size(free)}",
        )
    if free >= max(2 * request, request + policy.refused_free) and idle is not None:
        return base.but(
            cause="oom.artificial-limit",
            confidence="likely",
            summary=f"{asked} and was refused although {size(free)} were free.",
            formula=f"free {size(free)} >= request {size(request)}",
        )
    filled = memory_causes.decide_full(evidence, policy, base, message, first, asked)
    if filled is not None:
        return filled
    own, total = message.allocated, message.total
    names = {name for _file, _line, name in frames(first.traceback)}
    if own and total and own > total / 2 and names & {"forward", "backward"}:
        return base.but(
            cause="oom.activations",
            confidence="possible",
            summary=f"{asked} in a training pass; this process holds {size(own)} of {size(total)}.",
        )
    return _undecided(
        base, f"{asked} with {size(free)} free; the message does not say what filled the memory."
    )


def _undecided(base: Finding, text: str) -> Finding:
    """Context: it ran out of memory, and which of the causes it is stays open."""
    return base.but(cause="oom.activations", role="context", confidence="possible", summary=text)
