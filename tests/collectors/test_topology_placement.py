"""Where a plan's groups lie on the nodes' links, and which order would be better."""

from __future__ import annotations

from typing import Any

import pytest

from collectors.topology.graph import Gpu, Link, Nic, Topology
from collectors.topology.placement import better_orders, lay, per_node
from collectors.topology.plan import Plan, parse_plan


def node(host: str = "n0", gpus: int = 4, nics: int = 1, far: str = "socket") -> Topology:
    """GPUs in NVLink pairs (0,1), (2,3), ..., joined by `far`; NICs are near to equal shares."""
    links = [
        Link(
            f"GPU{a}",
            f"GPU{b}",
            "nvlink" if a // 2 == b // 2 else far,
            4 if a // 2 == b // 2 else None,
        )
        for a in range(gpus)
        for b in range(a + 1, gpus)
    ]
    share = max(1, gpus // nics)
    links += [
        Link(f"GPU{g}", f"NIC{n}", "pcie-switch" if g // share == n else "socket")
        for g in range(gpus)
        for n in range(nics)
    ]
    return Topology(
        host,
        tuple(Gpu(f"GPU{i}", i) for i in range(gpus)),
        tuple(Nic(f"NIC{i}") for i in range(nics)),
        tuple(links),
        f"{host}.txt",
    )


def plan(**changes: Any) -> Plan:
    raw = {"world": 8, "nodes": 2, "gpus_per_node": 4, "order": ["dp", "tp"], "tp": 2, "dp": 4}
    return parse_plan({**raw, **changes})


def test_groups_inside_a_node_lie_on_its_links() -> None:
    placed = lay(plan(), [node()])
    tp = placed.axes["tp"]
    assert tp.worst == "nvlink"
    assert tp.crossing == ()
    assert [g.ranks for g in tp.groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert placed.axes["dp"].worst == "network"


def test_a_group_over_two_pairs_is_as_slow_as_its_slowest_pair() -> None:
    tp = lay(plan(tp=4, dp=2), [node()]).axes["tp"]
    assert tp.worst == "socket"
    assert tp.groups[0].pair == (0, 2)
    assert tp.groups[0].kinds == {"nvlink", "socket"}


def test_a_group_on_two_nodes_is_on_the_network() -> None:
    tp = lay(plan(order=["tp", "dp"]), [node()]).axes["tp"]
    assert tp.worst == "network"
    assert len(tp.crossing) == 4
    assert tp.groups[0].nodes == (0, 1)


def test_a_custom_mapping_decides_where_ranks_lie() -> None:
    swapped = plan(rank_to_gpu=[0, 4, 1, 5, 2, 6, 3, 7])
    assert len(lay(swapped, [node()]).axes["tp"].crossing) == 4


def test_without_a_topology_links_inside_a_node_are_unknown() -> None:
    placed = lay(plan(), [])
    assert placed.axes["tp"].worst == "unknown"
    assert placed.axes["dp"].worst == "network"


def test_topologies_belong_to_nodes_by_number_or_by_likeness() -> None:
    a, b = node("a"), node("b")
    assert per_node(plan(), [b, a]) == (a, a)
    other = node("b", far="node")
    assert per_node(plan(), [other, a]) == (a, other)
    assert per_node(plan(), [a, other, node("c", far="host-bridge")]) == (None, None)


def test_axes_that_leave_by_one_nic_share_it() -> None:
    both = plan(order=["tp", "cp", "dp"], tp=2, cp=2, dp=2, gpus_per_node=2, nodes=4)
    placed = lay(both, [node(gpus=2)])
    assert {(s.node, s.nic, s.axes) for s in placed.shared} == {
        (n, "NIC0", ("tp", "cp")) for n in range(4)
    }
    assert lay(plan(), [node()]).shared == ()


def test_without_nics_the_way_out_is_the_network() -> None:
    both = plan(order=["tp", "cp", "dp"], tp=2, cp=2, dp=2, gpus_per_node=2, nodes=4)
    assert {s.nic for s in lay(both, []).shared} == {"network"}


@pytest.mark.parametrize(
    ("given", "best"),
    [
        (["tp", "dp"], ("dp", "tp")),
        (["dp", "tp"], None),
    ],
)
def test_a_better_order_keeps_tp_inside(given: list[str], best: tuple[str, ...] | None) -> None:
    found = better_orders(plan(order=given))
    assert (found[0] if found else None) == best


def test_no_order_is_better_when_tp_is_larger_than_a_node() -> None:
    assert better_orders(plan(tp=8, dp=1)) == []
