"""plan.yaml: how many ranks, on which nodes, in which mesh order.

In: a mapping as YAML gives it. Out: a checked frozen Plan, or PlanError with every reason at once.
The rank grid is row-major over `order` (outermost first, last axis fastest).
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from itertools import product
from typing import Any

AXES = ("pp", "dp", "cp", "tp", "ep")
_MOST = 1 << 20
"""A plan is enumerated; this bounds what a mistyped one can cost."""
_KEYS = {"world", "nodes", "gpus_per_node", "order", *AXES, "rank_to_gpu", "nics_per_node"}


class PlanError(ValueError):
    """A plan that cannot be; the message lists all reasons, one a line."""


@dataclass(frozen=True)
class Plan:
    """A parallel layout on a cluster."""

    world: int
    nodes: int
    gpus_per_node: int
    order: tuple[str, ...]
    sizes: dict[str, int] = field(hash=False)
    """Size of every axis in `order`; axes that are absent have size 1."""
    rank_to_gpu: tuple[int, ...]
    """Global slot (node * gpus_per_node + local GPU) of each rank."""
    nics_per_node: int | None = None
    source: str = "plan"
    ep: int = 1
    """Expert parallel size, which borrows ranks from dp and cp where `order` does not name it."""

    def node_of(self, rank: int) -> int:
        """Node on which `rank` runs."""
        return self.rank_to_gpu[rank] // self.gpus_per_node

    def gpu_of(self, rank: int) -> int:
        """Local GPU on which `rank` runs."""
        return self.rank_to_gpu[rank] % self.gpus_per_node

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of `rank` on every axis of `order`."""
        out: dict[str, int] = {}
        for axis in reversed(self.order):
            rank, out[axis] = divmod(rank, self.sizes[axis])
        return {axis: out[axis] for axis in self.order}

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Ranks of every group of `axis`: they differ in that coordinate only."""
        if self.sizes.get(axis, 1) == 1:
            return []
        others = [a for a in self.order if a != axis]
        index = {tuple(self.coordinates(r)[a] for a in self.order): r for r in range(self.world)}
        out = []
        for fixed in product(*(range(self.sizes[a]) for a in others)):
            where = dict(zip(others, fixed, strict=True))
            members = [
                index[tuple(i if a == axis else where[a] for a in self.order)]
                for i in range(self.sizes[axis])
            ]
            out.append(tuple(members))
        return out


def _whole(raw: dict[str, Any], key: str, default: int | None, wrong: list[str]) -> int:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        wrong.append(f"{key}: a whole number from 1 is needed, not {value!r}")
        return 1
    return value


def _slots(mapping: object, world: int, most: int, wrong: list[str]) -> tuple[int, ...]:
    if mapping == "identity":
        return tuple(range(world))
    fine = isinstance(mapping, list) and all(
        isinstance(s, int) and not isinstance(s, bool) for s in mapping
    )
    if (
        not isinstance(mapping, list)
        or not fine
        or [len(mapping), len({*mapping})] != [world, world]
    ):
        wrong.append("rank_to_gpu: `identity` or a list with one slot for each rank is needed")
        return ()
    if mapping and (min(mapping) < 0 or max(mapping) >= most):
        wrong.append(f"rank_to_gpu: slots run from 0 to {most - 1}")
    return tuple(mapping)


def _order(raw: dict[str, Any], sizes: dict[str, int], wrong: list[str]) -> tuple[str, ...]:
    order = raw.get("order", [a for a in ("pp", "dp", "cp", "tp") if sizes[a] > 1])
    if not isinstance(order, list) or any(a not in AXES for a in order):
        wrong.append(f"order: a list of {', '.join(AXES)} is needed, not {order!r}")
        return ()
    if len(set(order)) != len(order):
        wrong.append(f"order: an axis stands twice in {order}")
    # Experts borrow ranks from dp and cp; ep is an axis of the grid only when the plan orders it.
    missing = [a for a in AXES if sizes[a] > 1 and a not in order and a != "ep"]
    wrong.extend(f"order: {axis}={sizes[axis]} is missing in it" for axis in missing)
    return tuple(order)


def parse_plan(raw: object, source: str = "plan") -> Plan:
    """A Plan from the mapping that plan.yaml holds; PlanError lists all that is wrong."""
    if not isinstance(raw, dict):
        raise PlanError(f"{source}: a mapping is needed, such as `world: 64`")
    wrong: list[str] = []
    for key in raw:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, 1)
            wrong.append(f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else ""))
    sizes = {axis: _whole(raw, axis, 1, wrong) for axis in AXES}
    world = _whole(raw, "world", None, wrong)
    nodes = _whole(raw, "nodes", 1, wrong)
    per_node = _whole(raw, "gpus_per_node", max(1, -(-world // nodes)), wrong)
    order = _order(raw, sizes, wrong)
    nics = None if raw.get("nics_per_node") is None else _whole(raw, "nics_per_node", None, wrong)
    total = math.prod(sizes[axis] for axis in order)
    if not wrong and total != world:
        shape = " * ".join(f"{a}={sizes[a]}" for a in order)
        wrong.append(f"world: {shape or 'no axis'} = {total}, but world is {world}")
    if not wrong and nodes * per_node < world:
        wrong.append(f"world: {world} ranks on {nodes} nodes of {per_node} GPUs do not fit")
    if not wrong and world > _MOST:
        wrong.append(f"world: at most {_MOST} ranks")
    slots = (
        () if wrong else _slots(raw.get("rank_to_gpu", "identity"), world, nodes * per_node, wrong)
    )
    if wrong:
        raise PlanError("\n".join(f"{source}: {w}" for w in wrong))
    kept = {axis: sizes[axis] for axis in order}
    return Plan(world, nodes, per_node, order, kept, slots, nics, source, sizes["ep"])
