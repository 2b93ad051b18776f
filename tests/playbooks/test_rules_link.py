"""A plan is judged by where its groups lie; a sound one, or a box as built, yields nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from collectors.readers import read_paths
from collectors.topology.graph import Gpu, Link, Nic, Topology
from collectors.topology.plan import Plan, parse_plan
from playbooks.policy import Policy
from playbooks.rules.link import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from playbooks.finding import Finding

CASES = Path(__file__).parents[2].parent / "shared" / "cases"


def _box(cell: Callable[[int, int], int | str], gpus: int = 8, nics: int = 1) -> Topology:
    """A node whose pair (a, b) is joined by `cell(a, b)`: a count of NVLinks, or a kind."""
    links = []
    locators = {}
    for a in range(gpus):
        for b in range(a + 1, gpus):
            what = cell(a, b)
            kind, count = ("nvlink", what) if isinstance(what, int) else (what, None)
            links.append(Link(f"GPU{a}", f"GPU{b}", kind, count))
            locators[f"GPU{a}", f"GPU{b}"] = f"line {a + 2}"
    links += [Link(f"GPU{g}", f"NIC{n}", "pcie-switch") for g in range(gpus) for n in range(nics)]
    names = tuple(Gpu(f"GPU{i}", i) for i in range(gpus))
    cards = tuple(Nic(f"NIC{i}") for i in range(nics))
    return Topology("gx1", names, cards, tuple(links), "topo.txt", locators)


HGX = _box(lambda _a, _b: 18)
PCIE = _box(lambda a, b: "pcie-switch" if a // 2 == b // 2 else "socket")
BRIDGED = _box(lambda a, b: 4 if a // 2 == b // 2 else "socket")


def _plan(**changes: Any) -> Plan:
    raw = {"world": 16, "nodes": 2, "gpus_per_node": 8, "order": ["pp", "dp", "cp", "tp"]}
    return parse_plan({**raw, **changes}, "plan.yaml")


def _causes(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.cause, f.role) for f in found]


def test_tp_over_two_nodes_is_named_with_its_numbers_and_places() -> None:
    (found,) = check([HGX], _plan(tp=16), Policy())
    assert (found.cause, found.role, found.confidence) == (
        "link.tp-crosses-nodes",
        "root",
        "certain",
    )
    assert (found.axis, found.group, found.ranks) == ("tp", "tp[0..15]", ())
    assert "2 nodes of 8 GPUs" in found.summary
    assert [i.source for i in found.evidence] == ["plan.yaml", "topo.txt"]
    assert "node 1: tp ranks 8..15" in found.evidence[0].quote
    assert found.evidence[1].locator == "line 2"
    assert found.formula is not None
    assert "2 > 1" in found.formula


def test_without_a_topology_a_domain_that_spans_hosts_is_possible() -> None:
    (found,) = check([], _plan(tp=16), Policy())
    assert (found.cause, found.confidence) == ("link.tp-crosses-nodes", "likely")


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 8, "dp": 2},
        {"tp": 4, "pp": 2, "dp": 2},
        {"tp": 2, "cp": 2, "pp": 4},
        {"dp": 16},
        {"pp": 16},
    ],
)
def test_a_sound_plan_yields_nothing_though_dp_and_pp_cross(changes: dict[str, int]) -> None:
    assert check([HGX], _plan(**changes), Policy()) == []


def test_tp_small_enough_but_ordered_outside_crosses_and_the_better_order_is_told() -> None:
    plan = _plan(tp=2, dp=8, order=["pp", "tp", "cp", "dp"])
    (found,) = check([HGX], plan, Policy())
    assert found.cause == "link.tp-crosses-nodes"
    assert "[pp, dp, cp, tp]" in found.advice[0]
    assert len(found.advice) > 1, "the taxonomy's advice stands behind it"


def test_a_scattered_mapping_crosses_too() -> None:
    slots = [r // 2 + 8 * (r % 2) for r in range(16)]
    found = check([HGX], _plan(tp=2, dp=8, rank_to_gpu=slots), Policy())
    assert _causes(found) == [("link.tp-crosses-nodes", "root")]


def test_cp_on_the_same_nic_makes_contention_the_root_and_crossing_its_context() -> None:
    plan = _plan(tp=2, cp=2, dp=4, order=["tp", "cp", "dp"], gpus_per_node=4, nodes=4)
    found = check([_box(lambda _a, _b: 12, gpus=4)], plan, Policy())
    assert _causes(found) == [
        ("link.tp-cp-contention", "root"),
        ("link.tp-crosses-nodes", "context"),
    ]
    assert found[1].caused_by == found[0].cause
    assert "NIC0" in found[0].evidence[2].quote


def test_cp_that_stays_inside_leaves_crossing_the_root() -> None:
    plan = _plan(tp=2, cp=2, dp=4, order=["tp", "dp", "cp"])
    assert _causes(check([HGX], plan, Policy())) == [("link.tp-crosses-nodes", "root")]


def test_tp_on_a_box_without_nvlink_is_told_and_the_box_alone_is_not() -> None:
    plan = _plan(world=8, nodes=1, tp=8)
    (found,) = check([PCIE], plan, Policy())
    assert (found.cause, found.confidence) == ("link.nvlink-missing", "likely")
    assert "4 PIX, 24 SYS" in found.summary
    assert check([PCIE], None, Policy()) == []
    assert check([PCIE], _plan(world=8, nodes=1, dp=8), Policy()) == []


def test_tp_beyond_a_bridged_pair_is_told_and_within_it_is_fine() -> None:
    wide = _plan(world=8, nodes=1, tp=4, dp=2)
    (found,) = check([BRIDGED], wide, Policy())
    assert found.cause == "link.nvlink-missing"
    assert "2 NV4, 4 SYS" in found.summary
    assert check([BRIDGED], _plan(world=8, nodes=1, tp=2, dp=4), Policy()) == []


def test_pairs_that_miss_their_bridge_are_told_where_it_is() -> None:
    slots = [0, 2, 1, 3, 4, 6, 5, 7]
    (found,) = check([BRIDGED], _plan(world=8, nodes=1, tp=2, dp=4, rank_to_gpu=slots), Policy())
    assert "GPU0 and GPU1 have it" in found.summary


def test_bridged_pairs_without_a_plan_are_context_only() -> None:
    assert _causes(check([BRIDGED], None, Policy())) == [("link.nvlink-missing", "context")]


@pytest.mark.parametrize("left", [16, 12, "node"])
def test_a_gpu_with_fewer_links_than_its_equals_is_degraded(left: int | str) -> None:
    box = _box(lambda a, b: left if 5 in (a, b) else 18)
    (found,) = check([box], None, Policy())
    assert (found.cause, found.role) == ("link.nvlink-degraded", "root")
    assert "GPU5" in found.summary
    assert found.confidence == ("certain" if isinstance(left, int) else "likely")
    assert {i.source for i in found.evidence} == {"topo.txt"}


def test_a_degraded_gpu_under_a_plan_is_not_called_missing() -> None:
    box = _box(lambda a, b: "node" if 5 in (a, b) else 18)
    found = check([box], _plan(tp=8, dp=2), Policy())
    assert _causes(found) == [("link.nvlink-degraded", "root")]


def test_a_cube_mesh_is_as_it_was_built() -> None:
    """DGX-1: each GPU has two double and two single links and none to three others."""
    double = {(0, 3), (1, 2), (4, 7), (5, 6), (0, 4), (1, 5), (2, 3), (6, 7)}
    single = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}

    def cell(a: int, b: int) -> int | str:
        return 2 if (a, b) in double else 1 if (a, b) in single else "socket"

    assert [f.role for f in check([_box(cell)], None, Policy())] == ["context"]


def test_two_gpus_have_no_equals_to_be_compared_with() -> None:
    assert check([_box(lambda _a, _b: 4, gpus=2)], None, Policy()) == []


def test_the_order_of_topologies_decides_nothing() -> None:
    odd = _box(lambda a, b: 16 if 5 in (a, b) else 18)
    assert check([HGX, odd], None, Policy()) == check([odd, HGX], None, Policy())


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not beside the checkout")
@pytest.mark.parametrize(
    ("number", "causes"),
    [
        ("014", []),
        ("043", ["link.tp-cp-contention", "link.tp-crosses-nodes"]),
        ("044", ["link.tp-cp-contention", "link.tp-crosses-nodes"]),
        ("045", ["link.tp-crosses-nodes"]),
        ("046", []),
        ("047", []),
        ("049", ["link.nvlink-missing"]),
        ("050", ["link.nvlink-degraded"]),
        ("058", []),
    ],
)
def test_the_shared_cases(number: str, causes: list[str]) -> None:
    (case,) = CASES.glob(f"{number}-*")
    collected = read_paths([str(case / "inputs")])
    assert [f.cause for f in check(collected.topologies, collected.plan, Policy())] == causes
