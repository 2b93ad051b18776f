"""What the time goes to: one bar for the job, one stack a rank, a heat map when there are many.

Every moment of a rank between its first and its last record counts once: for the innermost phase
that it lies in, where waiting for a collective (the last `wait_ns` before its end) counts as
communication, and what no phase covers counts as other. So the parts sum to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from dashboards.figures.nesting import alone
from dashboards.figures.palette import phase_colour, phase_order
from dashboards.figures.selection import Intervals, Selection, intervals, kinds
from dashboards.figures.theme import Drawn, Missing, Theme, axis, faint, finish, plain
from playbooks import words

if TYPE_CHECKING:
    import numpy.typing as npt

    from collectors.collected import Collected

_PERCENT = {
    "range": [0, 100],
    "fixedrange": True,
    "tickvals": [*range(0, 101, 20)],
    "ticktext": [f"{p} %" for p in range(0, 101, 20)],
}
_SIDES = {"l": 20, "r": 28, "t": 8, "b": 8}

MANY = 32
"""Above this many ranks a heat map is easier to read than stacks."""


@dataclass(frozen=True)
class Shares:
    """Seconds of each rank in each phase; every row sums to that rank's observed time."""

    ranks: list[int]
    phases: list[str]
    seconds: npt.NDArray[np.float64]
    """Shape (ranks, phases)."""


def _waits(collected: Collected, chosen: Selection) -> Intervals:
    some = intervals(collected, "collectives", chosen)
    wait = collected.ints("collectives", "wait_ns")[some.row]
    kept = some.where((wait > 0) & ~some.open)
    begin = kept.end - wait[(wait > 0) & ~some.open]
    return Intervals(kept.row, kept.rank, kept.step, begin, kept.end, kept.open)


def shares(collected: Collected, chosen: Selection) -> Shares | None:
    """Time of each rank by phase; None when no phase and no wait is known."""
    phases = intervals(collected, "phases", chosen)
    waits = _waits(collected, chosen)
    steps = intervals(collected, "steps", chosen)
    if len(phases) + len(waits) == 0:
        return None
    kind, known = kinds(collected, "phases", "phase", "other")
    names = list(dict.fromkeys([*known, "communication", "other"]))
    kind = np.asarray([names.index(k) for k in known], dtype=np.int64)[kind]
    rank = np.concatenate([phases.rank, waits.rank])
    start = np.concatenate([phases.start, waits.start])
    end = np.concatenate([phases.end, waits.end])
    which = np.concatenate(
        [kind[phases.row], np.full(len(waits), names.index("communication"), dtype=np.int64)]
    )
    order = np.lexsort((-end, start, rank))
    rank, start, end, which = rank[order], start[order], end[order], which[order]
    present, place = np.unique(rank, return_inverse=True)
    own = alone(rank, start, end) / 1e9
    size = (len(present), len(names))
    cells = np.bincount(place * len(names) + which, weights=own, minlength=size[0] * size[1])
    out = cells.astype(np.float64).reshape(size)
    first = np.full(len(present), np.iinfo(np.int64).max)
    last = np.zeros(len(present), dtype=np.int64)
    ours = steps.where(np.isin(steps.rank, present))
    at = np.searchsorted(present, ours.rank)
    for where, begun, ended in ((place, start, end), (at, ours.start, ours.end)):
        np.minimum.at(first, where, begun)
        np.maximum.at(last, where, ended)
    out[:, names.index("other")] += np.maximum(0.0, (last - first) / 1e9 - out.sum(axis=1))
    ordered = sorted(range(len(names)), key=lambda j: phase_order(names[j]))
    ordered = [j for j in ordered if out[:, j].sum() > 0]
    return Shares([int(r) for r in present], [names[j] for j in ordered], out[:, ordered])


_NO_PHASES = Missing(
    "No phases were recorded.",
    "They come from the agent: start the job with `diag run -- CMD` (without --no-agent).",
)


def time_bar(collected: Collected, chosen: Selection, theme: Theme) -> Drawn | Missing:
    """One bar over all chosen ranks that sums to 100 %."""
    found = shares(collected, chosen)
    if found is None or found.seconds.sum() == 0:
        return _NO_PHASES
    total = found.seconds.sum()
    fig = go.Figure()
    for name, seconds in zip(found.phases, found.seconds.sum(axis=0), strict=True):
        share = 100 * seconds / total
        fig.add_bar(
            x=[share],
            y=[""],
            orientation="h",
            name=plain(name),
            marker={"color": phase_colour(name), "line": {"width": 0}},
            text=[f"{share:.0f} %" if share >= 4 else ""],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "#ffffff" if name in _DARK else "#1a1b1e"},
            textangle=0,
            hovertemplate=f"{plain(name)}: {share:.1f} %<br>{words.seconds(seconds)} of "
            f"{words.seconds(total)} rank-time over {len(found.ranks)} rank(s)<extra></extra>",
        )
    finish(
        fig,
        theme,
        84,
        barmode="stack",
        bargap=0.1,
        xaxis=_PERCENT | axis(theme),
        yaxis=axis(theme, showticklabels=False, fixedrange=True, showgrid=False),
        showlegend=False,
        margin=_SIDES,
    )
    return Drawn(fig, legend=_legend(found))


_DARK = {"backward", "communication", "optimizer", "compile", "evaluation"}
"""Phases whose colour carries white text better than black."""


def per_rank(collected: Collected, chosen: Selection, theme: Theme) -> Drawn | Missing:
    """Phase shares of every chosen rank: stacks, or a heat map above MANY ranks."""
    found = shares(collected, chosen)
    if found is None or found.seconds.sum() == 0:
        return _NO_PHASES
    total = found.seconds.sum(axis=1, keepdims=True)
    percent = 100 * np.divide(
        found.seconds, total, out=np.zeros_like(found.seconds), where=total > 0
    )
    if len(found.ranks) > MANY:
        return _heat(found, percent, theme)
    fig = go.Figure()
    labels = [f"rank {r}" for r in found.ranks]
    for j, name in enumerate(found.phases):
        fig.add_bar(
            x=percent[:, j],
            y=labels,
            orientation="h",
            name=plain(name),
            marker={"color": phase_colour(name), "line": {"width": 0}},
            customdata=[words.seconds(s) for s in found.seconds[:, j]],
            hovertemplate="%{y} · " + plain(name) + ": %{x:.1f} % (%{customdata})<extra></extra>",
        )
    finish(
        fig,
        theme,
        40 + 26 * max(3, len(labels)),
        barmode="stack",
        bargap=0.25,
        xaxis=_PERCENT | axis(theme),
        yaxis=axis(theme, autorange="reversed", fixedrange=True, type="category", dtick=1),
        showlegend=False,
        margin=_SIDES,
    )
    return Drawn(fig, legend=_legend(found))


def _legend(found: Shares) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    return (("", tuple((p, phase_colour(p)) for p in found.phases)),)


def _heat(found: Shares, percent: npt.NDArray[np.float64], theme: Theme) -> Drawn:
    median = np.median(percent, axis=0)
    apart = (percent - median).T
    most = max(2.0, float(np.abs(apart).max()))
    fig = go.Figure(
        go.Heatmap(
            z=apart.astype(np.float32),
            customdata=percent.T.astype(np.float32),
            x=found.ranks,
            y=[f"{plain(p)}, {m:.0f} %" for p, m in zip(found.phases, median, strict=True)],
            zmin=-most,
            zmax=most,
            colorscale=[(0, "#2378B5"), (0.5, faint(theme)), (1, "#D55E00")],
            colorbar={"ticksuffix": " pp", "thickness": 12, "outlinewidth": 0},
            hovertemplate="rank %{x} · %{y} in the median<br>"
            "this rank: %{customdata:.1f} % (%{z:+.1f} points)<extra></extra>",
        )
    )
    finish(
        fig,
        theme,
        60 + 34 * max(4, len(found.phases)),
        xaxis=axis(theme, title={"text": "rank"}, showgrid=False),
        yaxis=axis(theme, autorange="reversed", fixedrange=True, type="category", showgrid=False),
    )
    return Drawn(
        fig,
        f"{len(found.ranks)} ranks: the colour is the difference from the median rank's share, "
        "in percentage points.",
    )
