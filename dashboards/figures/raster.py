"""The timeline from afar: a grid of rank lanes by stretches of time.

In: more boxes than can be drawn. Out: one heat map trace whose cells have the colour of the kind
that takes most of them; empty where nothing ran. Work and size are bounded by CELLS, not by boxes
drawn, so a thousand ranks cost the browser what eight do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dashboards.figures.nesting import parents
from dashboards.figures.theme import plain
from playbooks.words import seconds

if TYPE_CHECKING:
    import numpy.typing as npt
    import plotly.graph_objects as go

    from dashboards.figures.timeline import Lane

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

CELLS = 60_000
"""Cells at most, both lanes of all ranks together."""
BINS = 700
"""Stretches of time at most: a screen has few more columns of pixels that can be told apart."""


_NOTHING = 1e-9
"""Share of a cell below which it counts as empty: what subtraction leaves of a covered phase."""


def cover(
    row: npt.NDArray[np.int64],
    kind: npt.NDArray[np.int64],
    start: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
    shape: tuple[int, int, int],
) -> npt.NDArray[np.float64]:
    """How much of each cell each kind covers; `start` and `end` in bins; shape (rows, bins, kinds).

    A box adds its part to its first and last bin, and one to those between, which a running sum
    over a +1/-1 pair does without a loop over bins.
    """
    rows, bins, kinds = shape
    start, end = np.clip(start, 0, bins), np.clip(end, 0, bins)
    first = np.minimum(start.astype(np.int64), bins - 1)
    last = np.minimum(end.astype(np.int64), bins - 1)
    same = first == last
    far = ~same
    place = (row * (bins + 1)) * kinds + kind
    size = rows * (bins + 1) * kinds

    def added(where: npt.NDArray[np.bool_], bin_: Ints, amount: Floats) -> Floats:
        index = place[where] + bin_[where] * kinds
        summed = np.bincount(index, weights=amount[where], minlength=size)
        return summed.astype(np.float64).reshape(rows, bins + 1, kinds)

    one = np.ones(len(row))
    out = added(same, first, end - start)
    out += added(far, first, first + 1 - start)
    out += added(far, last, end - last)
    whole = added(far, first + 1, one) - added(far, last, one)
    total: npt.NDArray[np.float64] = (out + np.cumsum(whole, axis=1))[:, :bins]
    return total


def _amount(
    lane: Lane, row: Ints, kind: Ints, begin: int, width: float, shape: tuple[int, int, int]
) -> npt.NDArray[np.float64]:
    """What each kind covers of each cell; an inner phase is taken from the one that holds it."""
    boxes = lane.boxes
    whole = cover(row, kind, (boxes.start - begin) / width, (boxes.end - begin) / width, shape)
    if lane.name != "phases":
        return whole
    holder = parents(boxes.rank, boxes.start, boxes.end)
    inner = np.flatnonzero(holder >= 0)
    end = np.minimum(boxes.end[inner], boxes.end[holder[inner]])
    taken = cover(
        row[inner],
        kind[holder[inner]],
        (boxes.start[inner] - begin) / width,
        (end - begin) / width,
        shape,
    )
    return whole - taken


def raster(
    fig: go.Figure, seen: list[Lane], rows: dict[int, int], window: tuple[int, int], zero: int
) -> str:
    """Draw both lanes of all `rows`; returns how long one cell is, as text."""
    begin, end = window
    bins = max(20, min(BINS, CELLS // max(1, 2 * len(rows))))
    width = max(1, end - begin) / bins
    names: list[str] = []
    colours: list[str] = []
    z = np.full((3 * len(rows), bins), np.nan, dtype=np.float32)
    text = np.full((3 * len(rows), bins), "", dtype=object)
    for offset, lane in enumerate(seen):
        kinds = lane.names
        if not kinds:
            continue
        amount = _amount(
            lane,
            np.searchsorted(np.asarray(list(rows), dtype=np.int64), lane.boxes.rank),
            lane.kind,
            begin,
            width,
            (len(rows), bins, len(kinds)),
        )
        top = amount.argmax(axis=2)
        share = amount.max(axis=2)
        z[offset::3] = np.where(share > _NOTHING, top + len(names), np.nan)
        labels = [plain(k) if offset == 0 else f"{plain(k)} collectives" for k in kinds]
        for rank, i in rows.items():
            text[3 * i + offset] = [
                f"rank {rank} · mostly {labels[k]}" if s > _NOTHING else ""
                for k, s in zip(top[i], share[i], strict=True)
            ]
        names += kinds
        colours += [lane.colour(k) for k in kinds]
    # Three rows a rank: its phases, its collectives, and a gap to the next rank that stays empty.
    y = [i + edge for i in range(len(rows)) for edge in (-0.41, 0.11, 0.34)]
    fig.add_heatmap(
        z=z,
        x=(begin - zero) / 1e9 + np.arange(bins + 1) * (width / 1e9),
        y=[*y, len(rows) - 0.41],
        text=text,
        hovertemplate="%{text}<br>at %{x:.4~g} s<extra></extra>",
        hoverongaps=False,
        zmin=-0.5,
        zmax=len(names) - 0.5,
        colorscale=_steps(colours),
        showscale=False,
    )
    return seconds(width / 1e9)


def _steps(colours: list[str]) -> list[tuple[float, str]]:
    """A colour scale with one flat step a colour."""
    count = len(colours)
    return [(edge / count, colour) for i, colour in enumerate(colours) for edge in (i, i + 1)]
