"""Links: a plan on its topology, and the topology itself.

In: Topologies and a Plan, both perhaps absent. Out: findings of
  link.tp-crosses-nodes    a tp group lies on several nodes
  link.tp-cp-contention    ... and cp traffic leaves by the same NIC: the narrower answer
  link.nvlink-missing      a tp group inside a node has pairs without NVLink, by construction
  link.nvlink-degraded     a GPU has fewer NVLinks than all its equals have among themselves
A plan is judged by where its groups lie, never by its size alone; without a plan the absence of
NVLink is no fault. Data and pipeline groups that leave a node are normal.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

from collectors.topology.draw import short
from collectors.topology.placement import better_orders, lay
from playbooks import costs, knowledge, layouts
from playbooks.finding import Finding, Item
from playbooks.rules.naming import progressed
from playbooks.words import count, label, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.topology.graph import Link, Topology
    from collectors.topology.placement import GroupPlacement, Placement
    from collectors.topology.plan import Plan
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Findings of a job's topologies and plan."""
    collected = evidence.collected
    given = collected.plan is not None
    plan = layouts.plan(evidence)
    driver = [t for t in collected.topologies if not t.modelled]
    found = check(driver or collected.topologies, plan, policy)
    if given or plan is None:
        return found
    return [f for f in found if _paid(evidence, f, policy)]


def _paid(evidence: Evidence, finding: Finding, policy: Policy) -> bool:
    """Whether an axis' cost is on record, or no step is; a job's own words are no plan to judge."""
    if finding.axis is None or finding.role != "root":
        return True
    share = costs.share(evidence, costs.WORDS[finding.axis])
    if share is not None:
        return share.value >= policy.axis_cost
    return not progressed(evidence)


def check(topologies: Sequence[Topology], plan: Plan | None, policy: Policy) -> list[Finding]:
    """Everything that topologies and plan decide."""
    known = sorted(topologies, key=lambda t: (t.host, t.source))
    found = [f for t in known for f in _degraded(t, policy)]
    if plan is None:
        found += [f for t in known for f in _partial(t, policy)]
    if plan is not None:
        placement = lay(plan, known)
        found += _crossing(placement)
        found += _missing(placement, policy)
    return found


# --- a plan whose tp leaves its nodes ---------------------------------------------------------


def _order(plan: Plan) -> str:
    return "[" + ", ".join(plan.order) + "]"


def _plan_item(plan: Plan, group: GroupPlacement, axis: str) -> Item:
    """Where a group's ranks lie, as evidence."""
    where = "; ".join(
        f"node {n}: {axis} ranks {spans(r for r in group.ranks if plan.node_of(r) == n)}"
        for n in group.nodes
    )
    return Item(
        plan.source,
        f"{axis}, order, gpus_per_node",
        f"{axis} {plan.sizes[axis]}, order {_order(plan)}, {plan.gpus_per_node} GPUs a node: "
        f"{where}",
    )


def _nvlink_item(placement: Placement) -> Item | None:
    """One NVLink pair of a node: what the plan gives up by leaving it."""
    for topology in placement.topologies:
        for link in topology.links if topology is not None else ():
            if topology is not None and link.kind == "nvlink":
                return Item(
                    topology.source,
                    topology.locators.get((link.a, link.b), "matrix"),
                    f"{link.a} and {link.b} of {topology.host} are joined by {short(link)}; "
                    "it ends at the host",
                )
    return None


def _shared_item(placement: Placement) -> Item | None:
    """A NIC over which both tp and cp leave."""
    for one in placement.shared:
        if {"tp", "cp"} <= set(one.axes):
            topology = placement.topologies[one.node]
            if topology is None or one.nic == "network":
                return Item(
                    placement.plan.source,
                    f"node {one.node}",
                    f"tp and cp groups both leave node {one.node}",
                )
            return Item(
                topology.source,
                f"column {one.nic}",
                f"GPUs of tp and of cp groups that leave node {one.node} share {one.nic}",
            )
    return None


def _advice(plan: Plan, cause: str) -> tuple[str, ...]:
    """The plan's own better order, then the taxonomy's advice."""
    usual = knowledge.cause(cause).advice
    better = better_orders(plan, 1)
    if not better:
        return usual
    order = ", ".join(better[0])
    own = f"`order: [{order}]` with contiguous ranks keeps more of tp and cp inside a node."
    return (own, *usual)


def _crossing(placement: Placement) -> list[Finding]:
    plan = placement.plan
    tp = placement.axes.get("tp")
    if tp is None or not tp.crossing:
        return []
    first = tp.crossing[0]
    told = any(t is not None for t in placement.topologies)
    confidence: Confidence = "certain" if told else "likely"
    evidence = [_plan_item(plan, first, "tp")]
    nvlink = _nvlink_item(placement)
    if nvlink is not None:
        evidence.append(nvlink)
    nodes = len(first.nodes)
    group = label("tp", first.ranks)
    crossing = Finding(
        cause="link.tp-crosses-nodes",
        role="root",
        confidence=confidence,
        summary=(
            f"{group} lies on {nodes} nodes of {plan.gpus_per_node} GPUs "
            f"({len(tp.crossing)} of {count(len(tp.groups), 'tp group')} cross nodes), so the "
            "collectives of every layer go over the network"
        ),
        group=group,
        axis="tp",
        evidence=tuple(evidence),
        advice=_advice(plan, "link.tp-crosses-nodes"),
        formula=(
            f"node(rank) = slot // gpus_per_node; {group}: "
            f"{{{', '.join(str(n) for n in first.nodes)}}}, {nodes} > 1"
        ),
    )
    shared = _shared_item(placement)
    cp = placement.axes.get("cp")
    if shared is None or cp is None or not cp.crossing:
        return [crossing]
    other = cp.crossing[0]
    contention = Finding(
        cause="link.tp-cp-contention",
        role="root",
        confidence=confidence,
        summary=(
            f"tp {tp.size} and cp {cp.size} both leave their nodes ({len(tp.crossing)} of "
            f"{len(tp.groups)} tp groups, {len(cp.crossing)} of {len(cp.groups)} cp groups) and "
            "share the same NICs in the same layers"
        ),
        group=group,
        axis="tp",
        evidence=(_plan_item(plan, first, "tp"), _plan_item(plan, other, "cp"), shared),
        advice=_advice(plan, "link.tp-cp-contention"),
        formula=crossing.formula,
    )
    return [contention, crossing.but(role="context", caused_by=contention.cause)]


# --- a plan whose tp stays in a node that has no NVLink for it --------------------------------


def _missing(placement: Placement, policy: Policy) -> list[Finding]:
    tp = placement.axes.get("tp")
    if tp is None or tp.crossing:
        return []
    slow = [g for g in tp.groups if g.worst not in ("nvlink", "network", "unknown")]
    if not slow:
        return []
    group = max(slow, key=lambda g: len(g.ranks))
    plan = placement.plan
    topology = placement.topologies[plan.node_of(group.ranks[0])]
    if topology is None or group.link is None:
        return []
    if not _by_construction(topology, group, plan, policy):
        return []
    kinds = Counter(
        short(topology.link(f"GPU{plan.gpu_of(a)}", f"GPU{plan.gpu_of(b)}"))
        for a, b in combinations(group.ranks, 2)
    )
    seen = ", ".join(f"{n} {word}" for word, n in sorted(kinds.items()))
    some = any(word.startswith("NV") for word in kinds)
    elsewhere = next((x for x in topology.links if x.kind == "nvlink"), None)
    hint = "" if elsewhere is None else f"; {elsewhere.a} and {elsewhere.b} have it"
    link = group.link
    return [
        Finding(
            cause="link.nvlink-missing",
            role="root",
            confidence="likely",
            summary=(
                f"tp {tp.size} lies on GPUs of {topology.host} "
                f"{'of which only some pairs have' if some else 'without'} NVLink: pairs of "
                f"{label('tp', group.ranks)} are {seen}{hint}"
            ),
            group=label("tp", group.ranks),
            axis="tp",
            evidence=(_plan_item(plan, group, "tp"), _link_item(topology, link)),
        )
    ]


def _by_construction(topology: Topology, group: GroupPlacement, plan: Plan, policy: Policy) -> bool:
    """Whether the pairs lack NVLink as built: no GPU lost links that all its equals have."""
    lost = {gpu for gpu, _, _ in _odd_gpus(topology, policy)}
    return not any(f"GPU{plan.gpu_of(rank)}" in lost for rank in group.ranks)


def _link_item(topology: Topology, link: Link) -> Item:
    place = topology.locators.get((link.a, link.b)) or topology.locators.get((link.b, link.a))
    return Item(topology.source, place or "matrix", f"{link.a} and {link.b}: {short(link)}")


def _partial(topology: Topology, policy: Policy) -> list[Finding]:
    """Without a plan it is context only that NVLink joins some pairs of a node and not others."""
    pairs = [x for x in topology.links if x.a.startswith("GPU") and x.b.startswith("GPU")]
    joined = [x for x in pairs if x.kind == "nvlink"]
    apart = [x for x in pairs if x.kind not in ("nvlink", "unknown")]
    if not joined or not apart or _odd_gpus(topology, policy):
        return []
    return [
        Finding(
            cause="link.nvlink-missing",
            role="context",
            confidence="possible",
            summary=(
                f"on {topology.host} NVLink joins {len(joined)} of {len(pairs)} pairs of GPUs; "
                "keep tp inside those"
            ),
            evidence=(_link_item(topology, joined[0]), _link_item(topology, apart[0])),
        )
    ]


# --- a GPU with fewer NVLinks than its equals -------------------------------------------------


def _odd_gpus(topology: Topology, policy: Policy) -> list[tuple[str, int, int]]:
    """(GPU, its most links to any peer, links among the others) of GPUs below their equals.

    Equals are the largest set of GPUs that are all joined by the same number of NVLinks; they have
    to be a majority. A cube mesh or bridged pairs have no such set and yield nothing.
    """
    counts = {
        frozenset((x.a, x.b)): (x.count or 0) if x.kind == "nvlink" else 0 for x in topology.links
    }
    gpus = [g.name for g in topology.gpus]
    usual = max(counts.values(), default=0)
    if not usual:
        return []
    degree = {
        g: sum(counts.get(frozenset((g, h)), 0) == usual for h in gpus if h != g) for g in gpus
    }
    equals = [g for g in gpus if degree[g] == max(degree.values())]
    whole = all(counts.get(frozenset(p), 0) == usual for p in combinations(equals, 2))
    if not whole or len(equals) < policy.equal_gpus or 2 * len(equals) <= len(gpus):
        return []
    out = []
    for gpu in gpus:
        pairs = [counts[p] for h in equals if (p := frozenset((gpu, h))) in counts]
        if gpu not in equals and pairs and max(pairs) < usual:
            out.append((gpu, max(pairs), usual))
    return out


def _degraded(topology: Topology, policy: Policy) -> list[Finding]:
    odd = _odd_gpus(topology, policy)
    if not odd:
        return []
    names = ", ".join(f"{gpu} ({most})" for gpu, most, _ in odd)
    usual = odd[0][2]
    first = odd[0][0]
    link = next(x for x in topology.links if first in (x.a, x.b) and "GPU" in x.a and "GPU" in x.b)
    fine = next(x for x in topology.links if x.kind == "nvlink" and x.count == usual)
    sure: Confidence = "certain" if all(most > 0 for _, most, _ in odd) else "likely"
    return [
        Finding(
            cause="link.nvlink-degraded",
            role="root",
            confidence=sure,
            summary=(
                f"on {topology.host} {names} ha{'s' if len(odd) == 1 else 've'} fewer NVLinks "
                f"to every peer than the {usual} that all other GPUs have among themselves"
            ),
            evidence=(_link_item(topology, link), _link_item(topology, fine)),
            formula=f"NVLinks of {first} to a peer: {odd[0][1]} < {usual}",
        )
    ]
