"""Libraries that found no memory beside torch's allocator: oom.comm-buffers.

In: lines of NCCL, cuBLAS and cuDNN about allocations that failed. Out: one root finding, unless
torch itself ran out of memory, which is another cause.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks import logs
from playbooks.finding import Finding, Item
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy


def library(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A library found no memory outside torch's cache, and torch itself raised nothing."""
    if any(r.kind.name == "memory" and "Tried to allocate" in r.text for r in evidence.raised):
        return []
    rows = [row for row, _ in evidence.story.of("oom.library")]
    rows += [
        row
        for row, fields in evidence.story.of("nccl.cuda-failure", "nccl.warn")
        if re.search(r"out of memory|Failed to CUDA (?:calloc|malloc)", str(row["quote"]))
    ]
    rows = [r for r in rows if "CUDA error" not in str(r["quote"]) or "NCCL" in str(r["quote"])]
    if not rows or evidence.story.of("train.done"):
        return []
    ranks = {r["rank"] for r in rows if r["rank"] is not None}
    pids = evidence.story.pids
    for row, fields in evidence.story.of("nccl.cuda-failure", "nccl.warn", "oom.library"):
        owner = pids.get(fields.get("pid") or -1)
        if owner is not None and row in rows:
            ranks.add(owner)
    items: list[Item] = [logs.item(r) for r in rows[:4]]
    times = [r["time_ns"] for r in rows if r["time_ns"] is not None]
    who = f" of {ranks_words(ranks)}" if ranks else ""
    return [
        Finding(
            "oom.comm-buffers",
            "root",
            "likely",
            f"A library{who} found no memory on the device outside torch's cache, which holds the "
            "rest; the communication errors follow from it.",
            ranks=tuple(sorted(ranks)),
            where="no-headroom",
            evidence=tuple(items[: policy.evidence_most]),
            excluded=(
                ("hang.device-error", "the CUDA failure is 2, out of memory"),
                ("oom.fragmentation", "the allocation that failed is not torch's"),
            ),
            at_ns=min(times) if times else None,
        )
    ]
