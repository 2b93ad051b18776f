"""Lays a plan on nodes: for every axis its groups, the links they use, and what axes share.

In: a Plan and the Topologies of its nodes (none, one for all nodes, or one a node). Out: a
Placement: facts only, no judgement. What no topology describes is "unknown"; a pair of ranks on
different nodes is "network", whatever joins the nodes.

    rank -> plan.rank_to_gpu -> (node, local GPU) -> topology.link(GPUa, GPUb)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING

from collectors.topology.graph import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.topology.graph import Link, Topology
    from collectors.topology.plan import Plan

INWARD = ("pp", "dp", "ep", "cp", "tp")
"""Axes from those whose traffic bears a network best to those that bear it worst."""
_HEAVY = ("tp", "cp", "ep")
"""Axes that communicate in every layer."""
_WORLD = 4096
"""Larger plans are laid, but no better order is searched."""
_NEAR = 3
"""A NIC beyond a host bridge is not a GPU's own."""


@dataclass(frozen=True)
class GroupPlacement:
    """One group of one axis."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    """Nodes that it touches, in order."""
    worst: str
    """Kind of the slowest link between any two members."""
    pair: tuple[int, int]
    """Two ranks between which that link lies."""
    link: Link | None
    """That link, when it is inside a node."""
    kinds: frozenset[str]
    """Kinds of link between its members."""


@dataclass(frozen=True)
class AxisPlacement:
    """All groups of one axis."""

    axis: str
    size: int
    groups: tuple[GroupPlacement, ...]
    worst: str

    @property
    def crossing(self) -> tuple[GroupPlacement, ...]:
        """Groups whose members lie on more than one node."""
        return tuple(g for g in self.groups if len(g.nodes) > 1)


@dataclass(frozen=True)
class Shared:
    """A way out of a node that several axes load."""

    node: int
    nic: str
    """Name of the NIC; "network" when the topology does not tell which one a GPU uses."""
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """A plan on its nodes."""

    plan: Plan
    axes: dict[str, AxisPlacement]
    shared: tuple[Shared, ...]
    topologies: tuple[Topology | None, ...]
    """Topology of each node; None where none is known."""


def per_node(plan: Plan, topologies: Sequence[Topology]) -> tuple[Topology | None, ...]:
    """One topology a node: one for all, one each in the order of their hosts, else None."""
    known = sorted(topologies, key=lambda t: t.host)
    if len(known) == 1 or (known and all(_alike(known[0], t) for t in known[1:])):
        return (known[0],) * plan.nodes
    if len(known) == plan.nodes:
        return tuple(known)
    return (None,) * plan.nodes


def _alike(a: Topology, b: Topology) -> bool:
    return a.gpus == b.gpus and a.nics == b.nics and set(a.links) == set(b.links)


def _order(kind: str) -> int:
    return KINDS.get(kind, KINDS["unknown"])


def _worst(kinds: set[str] | frozenset[str]) -> str:
    """The slowest kind; "network" is slower than what is unknown inside a node."""
    if "network" in kinds:
        return "network"
    return max(kinds, key=lambda k: (_order(k), k), default="unknown")


class _Lay:
    """Looks links up once a pair of local GPUs."""

    def __init__(self, plan: Plan, topologies: Sequence[Topology]) -> None:
        self.plan = plan
        self.nodes = per_node(plan, topologies)
        self.tables: dict[int, dict[frozenset[str], Link]] = {}
        for topology in self.nodes:
            if topology is not None and id(topology) not in self.tables:
                self.tables[id(topology)] = {frozenset((x.a, x.b)): x for x in topology.links}

    def between(self, a: int, b: int) -> tuple[str, Link | None]:
        """Kind of the link between two ranks, and the link inside a node."""
        node = self.plan.node_of(a)
        if node != self.plan.node_of(b):
            return "network", None
        topology = self.nodes[node]
        if topology is None:
            return "unknown", None
        pair = frozenset((f"GPU{self.plan.gpu_of(a)}", f"GPU{self.plan.gpu_of(b)}"))
        link = self.tables[id(topology)].get(pair)
        return ("unknown", None) if link is None else (link.kind, link)

    def group(self, ranks: tuple[int, ...]) -> GroupPlacement:
        nodes = tuple(sorted({self.plan.node_of(r) for r in ranks}))
        kinds: dict[str, tuple[tuple[int, int], Link | None]] = {}
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.plan.node_of(rank), []).append(rank)
        if len(nodes) > 1:
            kinds["network"] = ((by_node[nodes[0]][-1], by_node[nodes[1]][0]), None)
        for some in by_node.values():
            for a, b in combinations(some, 2):
                kind, link = self.between(a, b)
                kinds.setdefault(kind, ((a, b), link))
        worst = _worst(set(kinds))
        pair, link = kinds[worst]
        return GroupPlacement(ranks, nodes, worst, pair, link, frozenset(kinds))

    def nics(self, rank: int) -> tuple[str, ...]:
        """NICs that are nearest to a rank's GPU, of those that the plan uses; else "network"."""
        topology = self.nodes[self.plan.node_of(rank)]
        if topology is None or not topology.nics:
            return ("network",)
        gpu = f"GPU{self.plan.gpu_of(rank)}"
        table = self.tables[id(topology)]
        found: dict[str, list[str]] = {}
        for nic in topology.nics:
            link = table.get(frozenset((gpu, nic.name)))
            if link is not None:
                found.setdefault(link.kind, []).append(nic.name)
        if not found:
            return ("network",)
        return tuple(found[min(found, key=_order)])


def lay(plan: Plan, topologies: Sequence[Topology]) -> Placement:
    """The placement of every axis that has more than one member."""
    layer = _Lay(plan, topologies)
    axes: dict[str, AxisPlacement] = {}
    for axis in plan.order:
        groups = tuple(layer.group(ranks) for ranks in plan.groups(axis))
        if groups:
            worst = _worst({g.worst for g in groups})
            axes[axis] = AxisPlacement(axis, plan.sizes[axis], groups, worst)
    return Placement(plan, axes, _shared(layer, axes), layer.nodes)


def _shared(layer: _Lay, axes: dict[str, AxisPlacement]) -> tuple[Shared, ...]:
    """Ways out of nodes that members of crossing groups of two or more axes use."""
    users: dict[tuple[int, str], set[str]] = {}
    for axis, placed in axes.items():
        for group in placed.crossing:
            for rank in group.ranks:
                for nic in layer.nics(rank):
                    users.setdefault((layer.plan.node_of(rank), nic), set()).add(axis)
    order = layer.plan.order
    return tuple(
        Shared(node, nic, tuple(sorted(some, key=order.index)))
        for (node, nic), some in sorted(users.items())
        if len(some) > 1
    )


def _crossings(plan: Plan) -> tuple[int, ...]:
    """Groups that leave their node, of each heavy axis, the heaviest first."""
    return tuple(
        sum(len({plan.node_of(r) for r in ranks}) > 1 for ranks in plan.groups(axis))
        for axis in _HEAVY
    )


def better_orders(plan: Plan, most: int = 3) -> list[tuple[str, ...]]:
    """Mesh orders with contiguous ranks under which fewer groups of tp, cp or ep leave a node.

    Best first, and of equal ones those nearest to pp, dp, ep, cp, tp. None when no order is better,
    or the plan is too large to try them.
    """
    if plan.world > _WORLD:
        return []
    now = _crossings(plan)
    straight = tuple(range(plan.world))
    tried = []
    for order in permutations(plan.order):
        sizes = {axis: plan.sizes[axis] for axis in order}
        found = _crossings(replace(plan, order=order, sizes=sizes, rank_to_gpu=straight))
        if found < now and all(a <= b for a, b in zip(found, now, strict=True)):
            usual = sorted(order, key=INWARD.index)
            tried.append((found, sum(a != b for a, b in zip(order, usual, strict=True)), order))
    return [order for _, _, order in sorted(tried)[:most]]
