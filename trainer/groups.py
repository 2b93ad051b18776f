"""Which ranks make a group: arithmetic on the grid, without torch and without a process group.

In: sizes of the mesh's axes, outermost first; the last axis's ranks are neighbours.
Out: rows of global ranks.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def rows(sizes: Mapping[str, int], names: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ in the axes `names` only, ascending; `sizes` from the outermost axis on."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, sizes.values()))):
        rest = tuple(at for name, at in zip(sizes, place, strict=True) if name not in names)
        found.setdefault(rest, []).append(rank)
    return list(found.values())


def divide(
    rows: list[list[int]], size: int, *, far: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Each row of data ranks in groups of `size`, and those with the same place in their groups.

    The groups share something (experts, or ZeRO's shards) and the others hold the same part of it.
    Near: a group is `size` neighbours. Far: its ranks are as far apart as can be, and those that
    hold the same are neighbours.
    """
    groups: list[list[int]] = []
    same: list[list[int]] = []
    for row in rows:
        wide = len(row) // size if far else size
        chunks = [row[at : at + wide] for at in range(0, len(row), wide)]
        strided = [row[at::wide] for at in range(wide)]
        groups += strided if far else chunks
        same += chunks if far else strided
    return groups, same


def ep_is_far(order: tuple[str, ...]) -> bool:
    """Whether mesh.order puts ep before dp and cp: experts then are shared by ranks far apart."""
    return "ep" in order and order.index("ep") < order.index("dp")
