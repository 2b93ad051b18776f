"""Numbers over steps: step time by rank, and the loss.

In: the steps table and a selection. Out: line figures; more ranks than lines can be told apart
become the fastest, the median and the slowest of each step, and the note says so.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from dashboards.figures.palette import line_colour
from dashboards.figures.selection import Intervals, Selection, intervals
from dashboards.figures.theme import Drawn, Missing, Theme, axis, finish

if TYPE_CHECKING:
    import numpy.typing as npt

    from collectors.collected import Collected

LINES_AT_MOST = 16
"""Ranks drawn one line each."""
POINTS_AT_MOST = 1500
"""Steps drawn one point each; beyond that the slowest of each stretch of steps stands for it."""
_HEIGHT = 260


def _thin(
    step: npt.NDArray[np.int64], value: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Points sorted by step, at most POINTS_AT_MOST: each stretch keeps its highest."""
    order = np.argsort(step, kind="stable")
    step, value = step[order], value[order]
    if len(step) <= POINTS_AT_MOST:
        return step, value
    cuts = np.linspace(0, len(step), POINTS_AT_MOST + 1).astype(np.int64)[:-1]
    pieces = np.append(cuts, len(step))
    top = [a + int(np.argmax(value[a:b])) for a, b in pairwise(pieces.tolist())]
    return step[top], value[top]


def _band(fig: go.Figure, done: Intervals, seconds: npt.NDArray[np.float64]) -> None:
    order = np.argsort(done.step, kind="stable")
    numbers, begin = np.unique(done.step[order], return_index=True)
    parts = np.split(seconds[order], begin[1:])
    rank_parts = np.split(done.rank[order], begin[1:])
    slowest = [int(r[int(np.argmax(p))]) for p, r in zip(parts, rank_parts, strict=True)]
    who = dict(zip(numbers.tolist(), slowest, strict=True))
    lines = (
        ("fastest rank", 2, [float(p.min()) for p in parts]),
        ("median rank", 0, [float(np.median(p)) for p in parts]),
        ("slowest rank", 1, [float(p.max()) for p in parts]),
    )
    for name, colour, values in lines:
        step, value = _thin(numbers, np.asarray(values))
        named = name == "slowest rank"
        fig.add_scatter(
            x=step,
            y=value,
            name=name,
            mode="lines",
            line={"color": line_colour(colour), "width": 1.6},
            customdata=[f" (rank {who[int(s)]})" if named else "" for s in step],
            hovertemplate="step %{x} · " + name + "%{customdata}: %{y:.4s}s<extra></extra>",
        )


def step_time(collected: Collected, chosen: Selection, theme: Theme) -> Drawn | Missing:
    """Duration of finished steps, in seconds, by rank."""
    some = intervals(collected, "steps", chosen)
    done = some.where(~some.open & (some.step >= 0))
    if len(done) == 0:
        return Missing(
            "No finished step was recorded.",
            "A step ends when the optimizer has stepped, or where the program says "
            "`collectors.annotate.step`.",
        )
    seconds = (done.end - done.start) / 1e9
    fig = go.Figure()
    ranks = np.unique(done.rank)
    notes = []
    if len(ranks) > LINES_AT_MOST:
        _band(fig, done, seconds)
        notes.append(f"{len(ranks)} ranks: the fastest, the median and the slowest of each step.")
    else:
        for index, rank in enumerate(ranks):
            mine = done.rank == rank
            step, value = _thin(done.step[mine], seconds[mine])
            fig.add_scatter(
                x=step,
                y=value,
                name=f"rank {rank}",
                mode="lines+markers" if len(step) <= 60 else "lines",
                line={
                    "color": line_colour(index),
                    "width": 1.6,
                    "dash": "solid" if index < 8 else "dot",
                },
                marker={"size": 4},
                hovertemplate=f"rank {rank} · step %{{x}}: %{{y:.4s}}s<extra></extra>",
            )
    if len(np.unique(done.step)) > POINTS_AT_MOST:
        notes.append("Each point is the slowest of several steps; choose fewer steps to see each.")
    finish(
        fig,
        theme,
        _HEIGHT,
        xaxis=axis(theme, title={"text": "step"}, tickformat="d"),
        yaxis=axis(theme, rangemode="tozero", ticksuffix="s", tickformat=".3~s"),
    )
    return Drawn(fig, " ".join(notes))


def loss(collected: Collected, chosen: Selection, theme: Theme) -> Drawn | Missing:
    """Loss of each step. It is the whole step's, so one value is shown, whichever rank has it."""
    steps = collected.ints("steps", "step")
    value = collected.floats("steps", "loss")
    told = collected.tables["steps"].column("loss").is_valid().to_numpy()
    kept = Selection(None, chosen.first, chosen.last).keep(np.zeros_like(steps), steps)
    kept &= told & (steps >= 0)
    bad = np.unique(steps[kept & ~np.isfinite(value)])
    kept &= np.isfinite(value)
    note = f"Not finite at {len(bad)} step(s), first at step {bad[0]}." if len(bad) else ""
    if not kept.any():
        return Missing(
            f"No finite loss: {note.lower()}" if len(bad) else "No loss was recorded.",
            "The program tells it with `collectors.annotate.numbers(loss=...)`.",
        )
    numbers, first = np.unique(steps[kept], return_index=True)
    step, shown = _thin(numbers, value[kept][first])
    fig = go.Figure(
        go.Scatter(
            x=step,
            y=shown,
            mode="lines+markers" if len(step) <= 60 else "lines",
            line={"color": line_colour(0), "width": 1.8},
            marker={"size": 4},
            hovertemplate="step %{x}: loss %{y:.5g}<extra></extra>",
            showlegend=False,
        )
    )
    finish(
        fig,
        theme,
        _HEIGHT,
        xaxis=axis(theme, title={"text": "step"}, tickformat="d"),
        yaxis=axis(theme),
    )
    return Drawn(fig, note)
