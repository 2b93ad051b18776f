"""NCCL Inspector: one JSON object a line, one file a process, its communicators in any order.

In: lines with header, metadata and coll_perf (v3 and v4). Out: one log_events row of kind
inspector.rank {rank, ranks, span_us, groups {communicator|operation: [time in us, ...]}} for the
process; its rank is that in the largest communicator. Times hold the wait for late members.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from collectors.collected import Reading, Source

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact

KIND = "inspector"
_MOST = 20_000
"""Collectives that are kept."""


def sniff(head: bytes) -> bool:
    """Objects with a header and performance of a collective."""
    return head.lstrip().startswith(b"{") and b'"coll_perf"' in head and b'"header"' in head


def read(artifact: Artifact) -> Reading:
    """Times of each collective of one process."""
    problems: list[str] = []
    found: dict[str, dict[int, float]] = defaultdict(dict)
    ranks: dict[int, int] = {}
    host, stamps, bad, kept = None, [], 0, 0
    for _, raw in artifact.lines(problems):
        row = _object(raw)
        header, perf = row.get("header"), row.get("coll_perf")
        if not isinstance(header, dict) or not isinstance(perf, dict):
            bad += bool(raw.strip()) and "p2p_perf" not in row
            continue
        size, rank = header.get("n_ranks"), header.get("rank")
        time, number = perf.get("coll_exec_time_us"), perf.get("coll_sn")
        if isinstance(size, int) and isinstance(rank, int) and 0 <= rank < size < 2**24:
            ranks.setdefault(size, rank)
        if isinstance(time, int | float) and isinstance(number, int) and kept < _MOST:
            kept += 1
            found[f"{header.get('id')}|{perf.get('coll')}"[:120]][number] = float(time)
        metadata = row.get("metadata")
        if isinstance(metadata, dict):
            host = metadata.get("hostname", host)
            stamp = metadata.get("dump_timestamp_us")
            stamps += [stamp] if isinstance(stamp, int) else []
    reading = Reading(Source(artifact.path, KIND, "all"))
    world = max(ranks, default=None)
    rank = ranks[world] if world else None
    if bad:
        problems.append(f"{bad} lines are no records of a collective")
    if world:
        reading.world_size = world
    fields = {
        "rank": rank,
        "span_us": max(stamps) - min(stamps) if stamps else 0,
        "groups": {k: [v[n] for n in sorted(v)] for k, v in found.items()},
    }
    spent = sum(sum(v.values()) for v in found.values())
    reading.add(
        "log_events",
        rank=rank,
        host=str(host)[:200] if host else None,
        source=artifact.path,
        locator="coll_perf",
        kind="inspector.rank",
        fields=json.dumps(fields),
        quote=f"{kept} collectives of {spent / 1e3:.1f} ms in all",
    )
    reading.source = Source(artifact.path, KIND, "part" if bad else "all", tuple(problems))
    return reading


def _object(raw: str) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
