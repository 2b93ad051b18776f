"""A plan from what a job says of itself, where no plan.yaml was given.

In: Evidence: sizes in configurations, launchers' options, hosts and ranks in NCCL's lines. Out: a
Plan with the frameworks' usual order (pp, dp, cp, tp; the last axis fastest), or None where a size
is missing or has several values. Ranks lie where NCCL's lines put them, else in the usual order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from collectors.topology.plan import PlanError, parse_plan

if TYPE_CHECKING:
    from collectors.topology.plan import Plan
    from playbooks.evidence import Evidence
    from playbooks.lines import Event

_MOST = 1 << 16


def sizes(evidence: Evidence) -> dict[str, Event]:
    """The one value of each size; sizes with several values are left out."""
    found: dict[str, dict[float, Event]] = defaultdict(dict)
    for event in evidence.lines.of("config.value"):
        value = event.number("value")
        if value is not None:
            found[event.text("name")].setdefault(value, event)
    return {n: next(iter(v.values())) for n, v in found.items() if len(v) == 1}


def option(evidence: Evidence, *names: str) -> int | None:
    """The one whole number that a launcher's option has."""
    values = {
        int(e.text("value")[:7])
        for e in evidence.lines.of("launch.option")
        if e.text("name") in names and e.text("value").isdecimal()
    }
    return values.pop() if len(values) == 1 else None


def gpus_a_host(evidence: Evidence) -> int | None:
    """Ranks of one host, where all hosts have as many."""
    hosts: dict[str, set[int]] = defaultdict(set)
    for rank, process in evidence.nccl.of_rank.items():
        hosts[process.host].add(rank)
    counts = {len(r) for r in hosts.values()}
    local = {int(n) for e in evidence.lines.of("nccl-info.comm") if (n := e.number("local_ranks"))}
    told = option(evidence, "nproc-per-node")
    for known in (local, counts if len(hosts) > 1 else set()):
        if known:
            return max(known)
    if told:
        return told
    boxes = {len(t.gpus) for t in evidence.collected.topologies}
    return boxes.pop() if len(boxes) == 1 else None


def world(evidence: Evidence) -> int | None:
    """Ranks of the job."""
    largest = max((p.size or 0 for p in evidence.nccl.processes), default=0)
    nodes, each = option(evidence, "nnodes", "nodes"), gpus_a_host(evidence)
    launched = nodes * each if nodes and each else None
    told = sizes(evidence).get("world")
    number = None if told is None else told.number("value")
    return largest or evidence.world_size or (None if number is None else int(number)) or launched


def plan(evidence: Evidence) -> Plan | None:
    """The plan that was given, else the one that the job's own words make."""
    if evidence.collected.plan is not None:
        return evidence.collected.plan
    known = sizes(evidence)
    total, each = world(evidence), gpus_a_host(evidence)
    told = [a for a in ("tp", "cp", "ep") if a in known and (known[a].number("value") or 0) > 1]
    if total is None or each is None or not told or not 1 < total <= _MOST:
        return None
    each = min(each, total)
    raw: dict[str, object] = {"world": total, "nodes": -(-total // each), "gpus_per_node": each}
    axes: dict[str, int] = {
        str(a): int(known[a].number("value") or 1) for a in ("tp", "cp", "pp") if a in known
    }
    rest, odd = divmod(total, math.prod(axes.values()) or 1)
    if odd or rest < 1:
        return None
    raw |= {**axes, "dp": rest, "order": ["pp", "dp", "cp", "tp"]}
    ep = int(known["ep"].number("value") or 1) if "ep" in known else 1
    if ep > 1:
        raw["ep"] = ep
    places = _places(evidence, total, each)
    if places is not None:
        raw["rank_to_gpu"] = places
    try:
        return parse_plan(raw, known[told[0]].row["source"] or "plan")
    except PlanError:
        return None


def _places(evidence: Evidence, total: int, each: int) -> list[int] | None:
    """The slot of every rank by NCCL's lines; None when some are not told."""
    ranks = evidence.nccl.of_rank
    hosts: dict[str, int] = {}
    for rank in sorted(ranks):
        hosts.setdefault(ranks[rank].host, len(hosts))
    out = []
    for rank in range(total):
        process = ranks.get(rank)
        if process is None or process.gpu is None or process.gpu >= each:
            return None
        out.append(hosts[process.host] * each + process.gpu)
    fine = len(set(out)) == total and len(hosts) * each >= total
    return out if fine and len(hosts) == -(-total // each) else None


def node_of(evidence: Evidence, rank: int, each: int | None) -> str | None:
    """The host of a rank; a number in the usual order where nobody names it."""
    process = evidence.nccl.of_rank.get(rank)
    if process is not None:
        return process.host
    return None if each is None else f"node {rank // each}"
