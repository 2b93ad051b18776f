"""One quantity of one step as every rank printed it.

In: Rows and Layout. Out: Spreads: {rank: values}. A line of each rank makes one, and so does one
line with a value for each rank, where its words, its heading or the count of ranks say so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from playbooks.measures.quantities import mentioned
from playbooks.measures.values import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.finding import Item
    from playbooks.measures.layout import Layout
    from playbooks.measures.values import Row, Value

_PER_RANK = re.compile(
    r"(?i)\b(?:per|of|by|on|over|across|each|every|all)[ -](?:(?:each|every|all|the|\d+) )?"
    r"(?:(?P<axis>tp|dp|pp|cp|ep|data|tensor)[ -])?(?:ranks?|replicas?|gpus?|copies|workers?)\b|"
    r"\branks? ?\d+ ?(?:\.\.+|-|to) ?\d+|\brank0\b|(?P<local>\blocal\b)"
)
_OF_AXIS = re.compile(r"(?i)\b(tp|dp|pp)[ _-]rank[ =:]{1,2}(\d{1,5})\b|^(tp|dp|pp)(\d{1,5})\b")
_COORDINATE = re.compile(r"(?i)^(tp|dp|pp|cp)(\d{1,5})$")
_AXES = {"data": "dp", "tensor": "tp"}
_STATE = ("weight", "gradient", "optimizer", "random", "data", "activation", "loss")


@dataclass
class Spread:
    """What ranks printed of one thing."""

    quantity: str
    name: str
    label: str
    step: int | None
    epoch: int | None
    batch: int | None
    row: Row
    """The first line of it."""
    axis: str
    """Axis whose coordinate the keys are, "" for global ranks."""
    values: dict[int, tuple[str, ...]] = field(default_factory=dict)
    items: dict[int, Item] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """ "step 50", "epoch 1", ... as a sentence names it."""
        pairs = (("epoch", self.epoch), ("step", self.step), ("batch", self.batch))
        return ", ".join(f"{n} {v}" for n, v in pairs if v is not None) or "the check"

    def equal(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks printed the same."""
        first = self.values[ranks[0]]
        return all(_same(first, self.values[r]) for r in ranks[1:])

    def shown(self, ranks: Sequence[int]) -> str:
        """ "rank 0: a, rank 1: b" of the first few."""
        word = f"{self.axis} rank" if self.axis else "rank"
        return ", ".join(f"{word} {r}: {' '.join(self.values[r][:2])}" for r in list(ranks)[:4])


def _same(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def spreads(rows: Sequence[Row], layout: Layout) -> list[Spread]:
    """All of them, in the order of their first lines; only those of two ranks and more."""
    found: dict[tuple[object, ...], Spread] = {}
    out: list[Spread] = []
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for row in rows:
        out.extend(_inline(row))
        for value in row.values:
            quantity = value.quantity or mentioned(value.label) or mentioned(row.about)
            if quantity not in _STATE:
                continue
            listed = _listed(row, value, layout)
            if listed is not None:
                axis, values = listed
                one = _new(row, value, quantity, axis)
                one.values = {r: (t,) for r, t in values.items()}
                one.items = dict.fromkeys(values, row.item)
                out.append(one)
            elif value.rank is not None:
                _add(found, counts, value, value.rank, quantity)
            elif (spot := _spot(row)) is not None:
                _add(found, counts, replace(value, axis=spot[0]), spot[1], quantity)
    out.extend(found.values())
    out.sort(key=lambda s: (s.row.section, s.row.line))
    return [s for s in out if len(s.values) > 1]


def _spot(row: Row) -> tuple[str, int] | None:
    """(axis, coordinate) of a line that is of one coordinate: "tp rank 1: ..." or "tp1 ..."."""
    found = _OF_AXIS.search(row.text)
    return None if found is None else ((found[1] or found[3]).lower(), int(found[2] or found[4]))


def _inline(row: Row) -> list[Spread]:
    """Values that one line tells apart by coordinate: "tp0 9f3a tp1 77c2"."""
    found: dict[str, dict[int, Value]] = defaultdict(dict)
    for value in row.values:
        told = [m for w in value.rest.split() if (m := _COORDINATE.match(w))]
        if len(told) == 1 and value.rank is None:
            found[told[0][1].lower()].setdefault(int(told[0][2]), value)
    out = []
    for axis, values in found.items():
        if 0 not in values or len(values) < 2:
            continue
        first = values[0]
        quantity = first.quantity or mentioned(first.label) or mentioned(row.about)
        if quantity in _STATE:
            one = _new(row, first, quantity, axis)
            one.values = {r: v.texts for r, v in values.items()}
            one.items = dict.fromkeys(values, row.item)
            out.append(one)
    return out


def _add(
    found: dict[tuple[object, ...], Spread],
    counts: dict[tuple[object, ...], int],
    value: Value,
    rank: int,
    quantity: str,
) -> None:
    """One rank's line; lines that repeat without a step count up."""
    row = value.row
    spot = (row.at("step"), row.at("epoch"), row.at("batch", "microbatch"))
    # Ranks may write to files of their own: the same step in two files is one thing.
    base = (quantity, value.name, value.label, value.axis, row.attempt, *spot)
    turn = counts[(base, rank)]
    counts[(base, rank)] += 1
    one = found.get((*base, turn))
    if one is None:
        one = found[(*base, turn)] = _new(row, value, quantity, value.axis)
    one.values[rank] = value.texts
    one.items[rank] = row.item


def _new(row: Row, value: Value, quantity: str, axis: str) -> Spread:
    spot = (row.at("step"), row.at("epoch"), row.at("batch", "microbatch"))
    return Spread(quantity, value.name, value.label, *spot, row=row, axis=axis)


def _listed(row: Row, value: Value, layout: Layout) -> tuple[str, dict[int, str]] | None:
    """(axis, {coordinate or rank: value}) of a line with one value for each rank."""
    count = len(value.texts)
    if count < 2 or value.rank is not None:
        return None
    label = _PER_RANK.search(value.label)
    about = label or _PER_RANK.search(row.about)
    if about is None:
        return None
    axis = (about.group("axis") or "").lower()
    axis = _AXES.get(axis, axis)
    sizes = {s for told in layout.sizes.values() for s in told if s > 1}
    sizes |= {layout.world} if layout.world else set()
    if sizes and count not in sizes and (label is None or layout.world is not None):
        return None
    if axis and layout.world == count:
        axis = "" if layout.size(axis) != count else axis
    texts = {i: t for i, t in enumerate(value.texts) if t != "-"}
    return (axis, texts) if len(texts) > 1 else None


def groups_of(spread: Spread, layout: Layout, axis: str) -> list[list[int]]:
    """Ranks of this spread that differ on `axis` only; [] when unknown."""
    if spread.axis:
        return [sorted(spread.values)] if spread.axis == axis else []
    if axis == "pp":
        return layout.groups(spread.values, "pp") or []
    return layout.groups(spread.values, axis) or []


def apart(spread: Spread, groups: Sequence[Sequence[int]]) -> list[int]:
    """Members of the first group that is not equal; [] when all are equal."""
    return next((list(g) for g in groups if not spread.equal(g)), [])
