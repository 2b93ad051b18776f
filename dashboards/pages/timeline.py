"""Timeline: every rank on one clock, from the whole run down to one collective.

In: a View, the address, and the stretch that the reader zoomed to. Out: one figure, drawn anew by
the server for each stretch, so that what is sent never grows with the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, no_update

from dashboards.address import parse
from dashboards.figures.selection import Selection, ranks_of, step_span
from dashboards.figures.theme import theme_of
from dashboards.figures.timeline import timeline
from dashboards.parts import INPUTS, fill, filter_bar, keep_zoom, notice, plot, plot_outputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dash.development.base_component import Component

    from dashboards.runs import Runs, View

PATH = "/timeline"
TITLE = "Timeline"
ICON = "timeline"


def layout(view: View, chosen: Selection) -> Component:
    """The skeleton; the callbacks fill it."""
    if not view.timed:
        what = "There is nothing to lay out in time: no step, no phase, no collective was recorded."
        return notice(what, "They come from the agent: start the job with `diag run -- CMD`.")
    return dmc.Stack(
        [
            filter_bar(ranks_of(view.collected), chosen, step_span(view.collected)),
            dcc.Store(id="window"),
            plot(
                "timeline",
                "All ranks on one clock",
                "Upper row of a rank: its phases. Lower row: its collectives, coloured by the axis "
                "of their group. Drag to zoom, double-click to go back, point at a box to read it.",
            ),
        ],
        gap="md",
    )


def register(app: Dash, runs: Runs) -> None:
    """Install the callbacks of this page."""

    def zoomed(moved: Mapping[str, Any] | None, before: Any) -> Any:
        after = window_of(moved)
        return no_update if after is no_update or after == before else after

    def draw(
        search: str | None, _version: Any, scheme: str | None, window: dict[str, Any] | None
    ) -> list[Any]:
        address = parse(PATH, search)
        view = runs.view(runs.find(address.run) or runs.keys()[0])
        stretch = None if not window else (float(window["from"]), float(window["to"]))
        verdict = view.report.verdict if view.report is not None else None
        mark = None
        if verdict is not None and verdict.at_ns is not None:
            mark = (verdict.at_ns, verdict.cause)
        drawn = timeline(view.collected, address.chosen, theme_of(scheme), stretch, mark)
        return fill(drawn, f"{view.key} {address.search()}")

    app.callback(
        Output("window", "data"),
        Input("timeline", "relayoutData"),
        State("window", "data"),
        prevent_initial_call=True,
    )(zoomed)
    app.callback(plot_outputs("timeline"), *INPUTS, Input("window", "data"))(draw)
    keep_zoom(app, "timeline")


def window_of(moved: Mapping[str, Any] | None) -> Any:
    """The stretch on show after a move of the plot: a mapping, None for all, or no_update."""
    if not moved:
        return no_update
    if moved.get("xaxis.autorange"):
        return None
    ends = moved.get("xaxis.range") or [moved.get("xaxis.range[0]"), moved.get("xaxis.range[1]")]
    try:
        low, high = (float(e) for e in ends)
    except (TypeError, ValueError):
        return no_update
    return {"from": low, "to": high} if low < high else no_update
