"""Links: a plan on its topology, and the topology itself.

In: Topologies and a Plan, both perhaps absent. Out: findings of
  link.tp-crosses-nodes    a tp group lies on several nodes
  link.tp-cp-contention    ... and cp traffic leaves by the same NIC: the narrower answer
  link.axis-placement      cp or ep leaves its node although another order keeps it inside
  link.nvlink-missing      a tp group inside a node has pairs without NVLink, by construction
  link.nvlink-degraded     a GPU has fewer NVLinks than all its equals have among themselves
A plan is judged by where its groups lie, never by its size alone; without a plan the absence of
NVLink is no fault. Data and pipeline groups that leave a node are normal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from collectors.topology.draw import short
from collectors.topology.placement import better_orders, lay
from playbooks import costs, knowledge, layouts
from playbooks.finding import Finding, Item
from playbooks.rules.link_box import degraded, link_item, odd_gpus, partial
from playbooks.rules.naming import progressed
from playbooks.words import count, label, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.topology.graph import Topology
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
    found = [f for t in known for f in degraded(t, policy)]
    if plan is None:
        found += [f for t in known for f in partial(t, policy)]
    if plan is not None:
        placement = lay(plan, known)
        found += _crossing(placement) or _displaced(placement)
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


# --- a plan whose cp or ep leaves nodes that have room for it ---------------------------------


def _displaced(placement: Placement) -> list[Finding]:
    plan = placement.plan
    better = better_orders(plan, 1)
    for axis in ("cp", "ep"):
        placed = placement.axes.get(axis)
        if placed is None or not placed.crossing or not better:
            continue
        if placed.size > plan.gpus_per_node or not _fewer(plan, better[0], axis):
            continue
        group = placed.crossing[0]
        told = any(t is not None for t in placement.topologies)
        return [
            Finding(
                cause="link.axis-placement",
                role="root",
                confidence="certain" if told else "likely",
                summary=(
                    f"{label(axis, group.ranks)} lies on {len(group.nodes)} nodes "
                    f"({len(placed.crossing)} of {count(len(placed.groups), f'{axis} group')} "
                    f"cross), although order [{', '.join(better[0])}] keeps more of them inside"
                ),
                group=label(axis, group.ranks),
                axis=axis,
                where=f"{axis}-across-nodes",
                evidence=(_plan_item(plan, group, axis),),
                advice=_advice(plan, "link.axis-placement"),
                excluded=(
                    ("link.internode-too-slow", "another order takes the bytes off the network"),
                    ("slow.comm-exposed", "the axis lies on the network"),
                ),
                formula=f"node(rank) = slot // gpus_per_node; {axis} {placed.size} <= "
                f"{plan.gpus_per_node} GPUs a node, on {len(group.nodes)} nodes",
            )
        ]
    return []


def _fewer(plan: Plan, order: tuple[str, ...], axis: str) -> bool:
    """Whether fewer groups of that axis leave their nodes in another order."""

    def crossing(one: Plan) -> int:
        return sum(len({one.node_of(r) for r in ranks}) > 1 for ranks in one.groups(axis))

    sizes = {a: plan.sizes[a] for a in order}
    other = replace(plan, order=order, sizes=sizes, rank_to_gpu=tuple(range(plan.world)))
    return crossing(other) < crossing(plan)


# --- a plan whose tp stays in a node that has no NVLink for it --------------------------------


def _missing(placement: Placement, policy: Policy) -> list[Finding]:
    tp = placement.axes.get("tp")
    if tp is None or tp.crossing:
        return []
    slow = [g for g in tp.groups if g.worst not in ("nvlink", "xgmi", "network", "unknown")]
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
            evidence=(_plan_item(plan, group, "tp"), link_item(topology, link)),
        )
    ]


def _by_construction(topology: Topology, group: GroupPlacement, plan: Plan, policy: Policy) -> bool:
    """Whether the pairs lack NVLink as built: no GPU lost links that all its equals have."""
    lost = {gpu for gpu, _, _ in odd_gpus(topology, policy)}
    return not any(f"GPU{plan.gpu_of(rank)}" in lost for rank in group.ranks)
