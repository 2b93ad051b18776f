"""Where ranks stand on the axes, as far as anything printed says so.

In: Rows, sizes from configurations. Out: coordinates by rank and sizes by axis. Coordinates come
from lines that print them, else from sizes whose product is the world, in the usual order
(tp fastest, then cp, ep inside dp, dp, pp). Where neither holds they are unknown, never guessed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from playbooks.lines import Lines
    from playbooks.measures.values import Row

AXES = ("tp", "cp", "dp", "pp")
_MODEL = ("tp", "cp", "pp")
_TOKEN = re.compile(r"(?<![\w.])(tp|dp|pp|cp|ep)[ =:_-]{0,2}(\d{1,5})(?![\w.])", re.IGNORECASE)
_GROUPS = re.compile(
    r"\b(tp|dp|pp|cp|ep|tensor|data|pipeline|context)\w*[ _-](?:parallel )?groups?\W{0,4}"
    r"((?:[\[(][\d, ]+[\])][,; ]*)+)",
    re.IGNORECASE,
)
_COORDINATES = re.compile(
    r"(?<![\w.])(?:rank ?)?(\d{1,6}) ?\(((?:[a-z]{1,5} ?=? ?\d{1,5}[ ,;]*)+)\)", re.IGNORECASE
)
_PAIR = re.compile(r"([a-z]+) ?=? ?(\d+)", re.IGNORECASE)
_NAMES = {"s": "pp", "stage": "pp", "p": "pp", "d": "dp", "t": "tp", "c": "cp", "replica": "dp"}
_NAMES |= {"tensor": "tp", "data": "dp", "pipeline": "pp", "context": "cp"}


class Layout:
    """Sizes and coordinates of one pile."""

    def __init__(self, rows: Sequence[Row], lines: Lines, world: int | None) -> None:
        self.rows = rows
        self.lines = lines
        self.world_told = world

    @cached_property
    def sizes(self) -> dict[str, set[int]]:
        """Every size that the pile tells of an axis, and of "world" and "accumulation"."""
        out: dict[str, set[int]] = defaultdict(set)
        for event in self.lines.of("config.value"):
            value = event.number("value")
            if event.row["rank"] is not None and event.text("name") in (*AXES, "ep"):
                continue  # a rank's coordinate, printed as its size would be
            if value is not None and event.text("name") in (*AXES, "ep", "world", "accumulation"):
                out[event.text("name")].add(int(value))
        for row in self.rows:
            for key, value in row.settings.items():
                if key in (*AXES, "ep", "world", "accumulation") and value == int(value):
                    out[key].add(int(value))
            if row.rank is None and not row.context.get("step"):
                for axis, size in _TOKEN.findall(row.text):
                    if int(size) > 1:
                        out[axis.lower()].add(int(size))
        if self.world_told:
            out["world"].add(self.world_told)
        return out

    @cached_property
    def world(self) -> int | None:
        """The one world size; None when several are told or none."""
        told = self.sizes.get("world", set())
        if len(told) == 1:
            return next(iter(told))
        if len(told) > 1:
            return None
        product = 1
        for axis in AXES:
            product *= self.size(axis) or 1
        return product if product > 1 else None

    def size(self, axis: str) -> int | None:
        """The one size of an axis; None when several are told or none."""
        told = self.sizes.get(axis, set()) - {1} or self.sizes.get(axis, set())
        return next(iter(told)) if len(told) == 1 else None

    @property
    def model_parallel(self) -> bool:
        """Whether any axis but dp is told with more than one rank."""
        return any(max(self.sizes.get(axis, {1})) > 1 for axis in (*_MODEL, "ep")) or any(
            axis in place for place in self._printed.values() for axis in _MODEL
        )

    @cached_property
    def _printed(self) -> dict[int, dict[str, int]]:
        own: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        out: dict[int, dict[str, int]] = {}
        for row in self.rows:
            if row.rank is not None:
                for key in (*AXES, "ep", "stage"):
                    if (said := row.context.get(key, "")).isdecimal():
                        own[_NAMES.get(key, key)][row.rank].add(int(said))
            for rank, said in _COORDINATES.findall(row.text):
                told = {n.lower(): int(v) for n, v in _PAIR.findall(said)}
                named = {_NAMES.get(n, n): v for n, v in told.items()}
                if named.keys() <= {*AXES, "ep"}:
                    out.setdefault(int(rank), {}).update(named)
            for axis, lists in _GROUPS.findall(row.text):
                _grouped(out, _NAMES.get(axis.lower(), axis.lower()), lists)
        for axis, ranks in own.items():
            single = all(len(v) == 1 for v in ranks.values())
            if not single or len(ranks) < 2 or (len(own) == 1 and _constant(ranks)):
                continue  # a size that ranks print, not their place
            for rank, values in ranks.items():
                out.setdefault(rank, {}).setdefault(axis, next(iter(values)))
        return out

    @cached_property
    def _usual(self) -> dict[int, dict[str, int]]:
        world = self.world
        sizes = {axis: self.size(axis) for axis in AXES}
        known = 1
        for size in sizes.values():
            known *= size or 1
        missing = [a for a in AXES if sizes[a] is None]
        if not world or world % known or world > 1 << 16:
            return {}
        ep = self.size("ep")
        if known < world and ep and known * ep == world and sizes["dp"]:
            sizes["dp"] *= ep  # what is no expert is copied over both
        elif known < world:
            if "dp" not in missing:
                return {}
            sizes["dp"] = world // known
        out = {}
        for rank in range(world):
            rest, place = rank, {}
            for axis in AXES:
                size = sizes[axis] or 1
                place[axis], rest = rest % size, rest // size
            out[rank] = place
        return out

    def place(self, rank: int) -> dict[str, int] | None:
        """Coordinates of a rank; None when the pile does not tell."""
        if rank in self._printed:
            return self._printed[rank]
        if self._usual:
            return self._usual.get(rank)
        return None if self.model_parallel else {"dp": rank}

    def groups(self, ranks: Iterable[int], *axes: str) -> list[list[int]] | None:
        """`ranks` that differ on `axes` only, one list a group; None when places are unknown."""
        out: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for rank in sorted(ranks):
            place = self.place(rank)
            if place is None or not any(a in place for a in axes):
                return None
            told = {a: v for a, v in place.items() if a in {f"{x}-group" for x in axes}}
            rest = {a: v for a, v in place.items() if a not in axes and not a.endswith("-group")}
            out[tuple(sorted((told or rest).items()))].append(rank)
        return [g for g in out.values() if len(g) > 1]


def _constant(ranks: dict[int, set[int]]) -> bool:
    return len({v for values in ranks.values() for v in values}) == 1


def _grouped(out: dict[int, dict[str, int]], axis: str, lists: str) -> None:
    """Coordinates on one axis, from printed groups such as [0, 1], [2, 3]."""
    for number, inside in enumerate(re.findall(r"[\[(]([\d, ]+)[\])]", lists)):
        members = [int(m) for m in re.findall(r"\d{1,6}", inside)]
        for place, member in enumerate(members):
            spot = out.setdefault(member, {})
            spot[axis] = place
            spot.setdefault(f"{axis}-group", number)
