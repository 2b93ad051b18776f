"""Overview: the verdict, what the time goes to, step time and loss, every rank's phases.

In: a View and the address. Out: cards and plots. It decides nothing: the words are the report's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import Dash, Output, html

from dashboards.address import parse
from dashboards.figures import shares, steps
from dashboards.figures.selection import Selection, ranks_of, step_span, time_span
from dashboards.figures.theme import theme_of
from dashboards.pages.answer import answer, others
from dashboards.parts import (
    INPUTS,
    card,
    code,
    facts,
    fill,
    filter_bar,
    keep_zoom,
    notice,
    plot,
    plot_outputs,
)
from playbooks.words import seconds

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from dashboards.runs import Runs, View

PATH = "/"
TITLE = "Overview"
ICON = "overview"
PLOTS = ("time-bar", "step-time", "loss", "per-rank")


def layout(view: View, chosen: Selection) -> Component:
    """The skeleton; the callbacks fill it."""
    answer_place = html.Div(id="overview-answer")
    others_place = html.Div(id="overview-others")
    if not view.stepped:
        what = "No step and no phase was recorded, so there is no time to divide here."
        how = (
            "The timeline shows the collectives that were recorded."
            if view.timed
            else "The page on artifacts says which files there are and what was read of them."
        )
        return dmc.Stack([answer_place, notice(what, how), others_place], gap="md")
    return dmc.Stack(
        [
            answer_place,
            filter_bar(ranks_of(view.collected), chosen, step_span(view.collected)),
            plot(
                "time-bar",
                "What the time goes to",
                "All chosen ranks together, from first to last record; waiting for a collective "
                "counts as communication, what no phase covers as other.",
                {"displayModeBar": False},
            ),
            dmc.SimpleGrid(
                [
                    plot("step-time", "Step time", "Begin to end of each finished step."),
                    plot("loss", "Loss", "Of the whole step, as the program told it."),
                ],
                cols={"base": 1, "md": 2},
                spacing="md",
            ),
            plot(
                "per-rank",
                "Phases by rank",
                "Share of each rank's own time.",
                {"displayModeBar": False},
            ),
            others_place,
        ],
        gap="md",
    )


def register(app: Dash, runs: Runs) -> None:
    """Install the callbacks of this page."""

    def words(search: str | None, _version: Any, _scheme: str | None) -> list[Any]:
        key = runs.find(parse(PATH, search).run)
        if key is None:
            return [None, None]
        view = runs.view(key)
        report = view.report
        said = (
            notice("There is no report for this run.", view.problem or "", "red")
            if report is None
            else answer(report)
        )
        top = dmc.Grid(
            [
                dmc.GridCol(said, span={"base": 12, "lg": 8}),
                dmc.GridCol(about(view), span={"base": 12, "lg": 4}),
            ],
            gutter="md",
        )
        return [top, None if report is None else others(report)]

    def plots(search: str | None, _version: Any, scheme: str | None) -> list[Any]:
        address = parse(PATH, search)
        view = runs.view(runs.find(address.run) or runs.keys()[0])
        chosen, theme = address.chosen, theme_of(scheme)
        keep = f"{view.key} {address.search()}"
        drawn = (
            shares.time_bar(view.collected, chosen, theme),
            steps.step_time(view.collected, chosen, theme),
            steps.loss(view.collected, chosen, theme),
            shares.per_rank(view.collected, chosen, theme),
        )
        return [value for one in drawn for value in fill(one, keep)]

    app.callback(
        [Output("overview-answer", "children"), Output("overview-others", "children")], *INPUTS
    )(words)
    app.callback([output for name in PLOTS for output in plot_outputs(name)], *INPUTS)(plots)
    keep_zoom(app, *PLOTS)


def about(view: View) -> Component:
    """Facts of the run: what ran, how big, how long, how it ended."""
    run = view.collected.run
    report = view.report
    seen = len(report.coverage.ranks_seen) if report else len(ranks_of(view.collected))
    world = view.collected.world_size or run.get("world_size")
    pairs: list[tuple[str, Any]] = [("state", _state(view))]
    pairs.append(("ranks", f"{seen} of {world} seen" if world else f"{seen} seen"))
    started = run.get("started_ns")
    if isinstance(started, int):
        when = datetime.fromtimestamp(started / 1e9, UTC)
        pairs.append(("started", when.strftime("%Y-%m-%d %H:%M:%S UTC")))
    span = time_span(view.collected)
    if span is not None:
        pairs.append(("observed", seconds((span[1] - span[0]) / 1e9)))
    command = run.get("command")
    if isinstance(command, list) and command:
        pairs.append(("command", code(" ".join(str(c) for c in command))))
    return card(view.name, facts(pairs), h="100%")


def _state(view: View) -> Any:
    run = view.collected.run
    if view.live:
        return dmc.Badge("running", color="blue", variant="light")
    if run.get("interrupted"):
        return "interrupted"
    if run.get("signal") is not None:
        return f"ended by signal {run['signal']}"
    if run.get("exit_code") is not None:
        return f"finished, exit code {run['exit_code']}"
    return str(run.get("state") or "not a run of `diag run`")
