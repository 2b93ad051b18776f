"""All ranks on one clock: phases as boxes, collectives below them coloured by axis.

    rank 0  [data][ forward  ][ backward    ][opt]
             .......[tp][tp].....[tp][tp][ dp ]...
In: phases, collectives and groups, a selection, and the stretch of time the reader looks at.
Out: at most SHAPES boxes; when there are more, a raster of what takes most of each cell, and a note
that says so and how wide a cell is. Times in figures are seconds since the first record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from dashboards.figures.hover import describe
from dashboards.figures.palette import axis_colour, phase_colour, phase_order
from dashboards.figures.raster import raster
from dashboards.figures.selection import (
    Intervals,
    Selection,
    axis_of_group,
    intervals,
    kinds,
    ranks_of,
    time_span,
)
from dashboards.figures.theme import Drawn, Missing, Theme, axis, finish, ink, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from collectors.collected import Collected

    Ints = npt.NDArray[np.int64]

SHAPES = 4000
"""Boxes that a browser draws and moves without a stutter."""
LANES = {"phases": (-0.16, 0.5), "collectives": (0.24, 0.2)}
"""Centre and height of both lanes, relative to a rank's row."""
ALONE = (0.0, 0.6)
"""The same when there is only one lane, as with dumps that know collectives but no phases."""


@dataclass(frozen=True)
class Lane:
    """The boxes of one lane with their kinds."""

    name: str
    boxes: Intervals
    kind: Ints
    """Phase or axis of each box, as an index into `names`."""
    names: list[str]
    """Kinds of the whole run, phases in the order of a step."""
    colour: Callable[[str], str]

    def during(self, begin: int, end: int) -> Lane:
        """The boxes that touch a stretch of time, in ns."""
        mask = (self.boxes.end >= begin) & (self.boxes.start <= end)
        return Lane(self.name, self.boxes.where(mask), self.kind[mask], self.names, self.colour)


def _lane(
    name: str, boxes: Intervals, code: Ints, texts: list[str], colour: Callable[[str], str]
) -> Lane:
    """A lane whose kinds are those that its boxes have; `texts` may hold one more than once."""
    used = {texts[int(c)] for c in np.unique(code)}
    names = sorted(used, key=lambda k: (phase_order(k), k))
    place = {k: i for i, k in enumerate(names)}
    index = np.asarray([place.get(t, -1) for t in texts], dtype=np.int64)
    return Lane(name, boxes, index[code], names, colour)


def lanes(collected: Collected, chosen: Selection) -> tuple[Lane, Lane]:
    """Both lanes, whole run."""
    phases = intervals(collected, "phases", chosen)
    which, names = kinds(collected, "phases", "phase", "other")
    collectives = intervals(collected, "collectives", chosen)
    groups, keys = kinds(collected, "collectives", "group_id", "")
    axes = axis_of_group(collected)
    by_code = [axes.get(k, "unknown") for k in keys]
    return (
        _lane("phases", phases, which[phases.row], names, phase_colour),
        _lane("collectives", collectives, groups[collectives.row], by_code, axis_colour),
    )


def chosen_span(collected: Collected, chosen: Selection) -> tuple[int, int] | None:
    """The stretch of time of the chosen steps, or of the run, in ns."""
    if chosen.stepped:
        some = [intervals(collected, n, chosen) for n in ("steps", "phases", "collectives")]
        some = [s for s in some if len(s)]
        if some:
            return min(int(s.start.min()) for s in some), max(int(s.end.max()) for s in some)
    return time_span(collected)


def timeline(
    collected: Collected,
    chosen: Selection,
    theme: Theme,
    window: tuple[float, float] | None = None,
    mark: tuple[int, str] | None = None,
) -> Drawn | Missing:
    """The timeline of `chosen`; `window` in seconds since the first record; `mark`: (ns, label)."""
    origin = time_span(collected)
    span = chosen_span(collected, chosen)
    both = lanes(collected, chosen)
    if origin is None or span is None or sum(len(lane.boxes) for lane in both) == 0:
        return Missing(
            "No phases and no collectives were recorded for this selection.",
            "They come from the agent of `diag run`; or choose more ranks or steps above.",
        )
    zero = origin[0]
    begin, end = span
    if window is not None:
        begin, end = zero + round(window[0] * 1e9), zero + round(window[1] * 1e9)
    seen = [lane.during(begin, end) for lane in both]
    rows = {
        r: i
        for i, r in enumerate(ranks_of(collected) if chosen.ranks is None else sorted(chosen.ranks))
    }
    fig = go.Figure()
    count = sum(len(lane.boxes) for lane in seen)
    note = ""
    if count > SHAPES:
        cell = raster(fig, seen, rows, (begin, end), zero)
        note = (
            f"{count:,} boxes are more than the screen can show: each cell of {cell} has the "
            f"colour of what takes most of it. Zoom in to see every box."
        )
    else:
        drawn = [lane for lane in both if lane.names]
        for lane in seen:
            place = LANES[lane.name] if len(drawn) > 1 else ALONE
            _boxes(fig, collected, lane, rows, zero, place)
    _lay_out(fig, theme, rows, ((span[0] - zero) / 1e9, (span[1] - zero) / 1e9))
    if mark is not None:
        _mark(fig, (mark[0] - zero) / 1e9, mark[1], theme)
    return Drawn(fig, note, _legend(both))


def _boxes(
    fig: go.Figure,
    collected: Collected,
    lane: Lane,
    rows: dict[int, int],
    zero: int,
    place: tuple[float, float],
) -> None:
    """One bar trace a kind, so that colour and legend are a kind's."""
    boxes = lane.boxes
    centre, height = place
    y = np.searchsorted(np.asarray(list(rows), dtype=np.int64), boxes.rank) + centre
    start = (boxes.start - zero) / 1e9
    width = (boxes.end - boxes.start) / 1e9
    said = [lane.names[k] for k in lane.kind]
    texts = np.asarray(describe(collected, lane.name, boxes, said), dtype=object)
    for code, name in enumerate(lane.names):
        for running in (False, True):
            mine = (lane.kind == code) & (boxes.open == running)
            if not mine.any():
                continue
            fig.add_bar(
                x=width[mine],
                base=start[mine],
                y=y[mine],
                width=height,
                orientation="h",
                marker={
                    "color": lane.colour(name),
                    "line": {"width": 0},
                    "pattern": {"shape": "/" if running else "", "solidity": 0.45},
                },
                customdata=texts[mine],
                hovertemplate="%{customdata}<extra></extra>",
            )


def _legend(both: tuple[Lane, Lane]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Every kind of the run, so that the legend stays put while one zooms."""
    return tuple(
        (title, tuple((k, lane.colour(k)) for k in lane.names))
        for title, lane in zip(("phases", "collectives by axis"), both, strict=True)
        if lane.names
    )


def _lay_out(fig: go.Figure, theme: Theme, rows: dict[int, int], span: tuple[float, float]) -> None:
    count = len(rows)
    every = max(1, -(-count // 32))
    shown = [(r, i) for r, i in rows.items() if i % every == 0]
    pad = max(1e-6, (span[1] - span[0]) * 0.01)
    finish(
        fig,
        theme,
        int(min(1000, 76 + count * (46 if count <= 8 else 34 if count <= 16 else 24))),
        barmode="overlay",
        xaxis=axis(
            theme,
            title={"text": "seconds since the first record"},
            range=[span[0] - pad, span[1] + pad],
            tickformat=",.6~g",
        ),
        yaxis=axis(
            theme,
            range=[count - 0.5, -0.5],
            fixedrange=True,
            tickvals=[i for _, i in shown],
            ticktext=[f"rank {r}" for r, _ in shown],
            showgrid=False,
        ),
        showlegend=False,
        margin={"l": 8, "r": 12, "t": 24, "b": 8},
    )


def _mark(fig: go.Figure, at: float, label: str, theme: Theme) -> None:
    fig.add_vline(
        x=at,
        line={"color": ink(theme), "width": 1, "dash": "dash"},
        annotation={
            "text": plain(label),
            "font": {"size": 11, "color": ink(theme)},
            "yref": "paper",
            "yanchor": "bottom",
            "y": 1,
            "xanchor": "center",
        },
    )
