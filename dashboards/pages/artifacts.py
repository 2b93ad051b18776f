"""Artifacts: what the answer stands on, file by file, and what could not be read.

In: a View. Out: tables of sources and of ranks, and what the run says of itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import Dash, Output, html

from dashboards.address import parse
from dashboards.figures.selection import Selection, ranks_of
from dashboards.parts import INPUTS, card, code, facts, marked, notice, table
from playbooks.words import spans

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from collectors.collected import Source
    from dashboards.runs import Runs, View

PATH = "/artifacts"
TITLE = "Artifacts"
ICON = "artifacts"
_SHOWN = 500
_READ = {"all": "teal", "part": "yellow", "none": "red"}


def layout(view: View, chosen: Selection) -> Component:  # noqa: ARG001
    """The skeleton; the callback fills it."""
    return html.Div(id="artifacts")


def register(app: Dash, runs: Runs) -> None:
    """Install the callback of this page."""

    def show(search: str | None, _version: Any, _scheme: str | None) -> Any:
        key = runs.find(parse(PATH, search).run)
        return None if key is None else content(runs.view(key))

    app.callback(Output("artifacts", "children"), *INPUTS)(show)


def content(view: View) -> Component:
    """The page."""
    return dmc.Stack(
        [_ranks(view), _sources(view.collected.sources), _tables(view), _run(view)], gap="md"
    )


def _ranks(view: View) -> Component:
    if view.report is not None:
        cover = view.report.coverage
        world, seen, missing = cover.world_size, cover.ranks_seen, cover.missing_ranks
    else:
        world, seen, missing = view.collected.world_size, tuple(ranks_of(view.collected)), ()
    return card(
        "Ranks",
        facts(
            [
                ("world size", "not known" if world is None else str(world)),
                ("seen", spans(seen) if seen else "none"),
                ("missing", spans(missing) if missing else "none"),
            ]
        ),
    )


def _sources(sources: list[Source]) -> Component:
    if not sources:
        return card(
            "Files", notice("No file was read.", "The run directory is empty or not a run.")
        )
    order = {"none": 0, "part": 1, "all": 2}
    listed = sorted(sources, key=lambda s: (order.get(s.read, 0), s.path))
    rows = [
        [
            code(s.path),
            s.kind,
            dmc.Badge(s.read, color=_READ.get(s.read, "gray"), variant="light"),
            html.Div([html.Div(p) for p in s.problems]) if s.problems else "",
        ]
        for s in listed[:_SHOWN]
    ]
    more = len(listed) - _SHOWN
    return card(
        "Files",
        table(["file", "kind", "read", "what was not read, and why"], rows, "files"),
        dmc.Text(
            marked(f"and {more} more, all in `diag report --format json`"), size="sm", c="dimmed"
        )
        if more > 0
        else None,
        hint=f"{len(listed)} files; those that could not be read wholly come first.",
    )


def _tables(view: View) -> Component:
    counted = [(n, t.num_rows) for n, t in view.collected.tables.items()]
    return card(
        "Tables",
        facts([(n, f"{c:,} rows") for n, c in counted if c] or [("rows", "none")]),
        hint="What the files became. Tables without rows: "
        + (", ".join(n for n, c in counted if not c) or "none")
        + ".",
    )


def _run(view: View) -> Component | None:
    run = view.collected.run
    pairs: list[tuple[str, Any]] = [("directory", code(str(view.path)))]
    pairs += [(name, code(str(run[name]))) for name in ("cwd", "host") if run.get(name)]
    pairs += [(str(name), str(found)) for name, found in (run.get("versions") or {}).items()]
    agent = run.get("agent") or {}
    pairs += [("agent", str(p)) for p in agent.get("problems") or []]
    env = (run.get("env") or {}).get("set") or {}
    pairs += [(str(name), code(str(value))) for name, value in env.items()]
    return card("The run", facts(pairs))
