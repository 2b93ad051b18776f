"""Building blocks of the pages: cards, plots with a place for what is missing, the filter bar.

In: plain values. Out: Dash components. Text goes in as text: Dash escapes it, nothing here uses
raw HTML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import ClientsideFunction, Input, Output, State, dcc, html

from dashboards.figures.theme import Drawn, Missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash import Dash
    from dash.development.base_component import Component

    from dashboards.figures.selection import Selection

INPUTS = (
    Input("url", "search"),
    Input("version", "data"),
    Input("theme", "data"),
)
"""What every part of a page depends on: the address, the content of the run, the theme."""


def card(title: str | None, *children: Any, hint: str | None = None, **more: Any) -> Component:
    """A card; `hint` explains below the title what is shown and how it was computed."""
    head = [] if title is None else [dmc.Title(title, order=4, className="card-title")]
    if hint is not None:
        head.append(dmc.Text(hint, size="sm", c="dimmed"))
    return dmc.Card(
        [dmc.Stack(head, gap=2, mb="sm") if head else None, *children],
        withBorder=True,
        radius="md",
        padding="lg",
        **more,
    )


def plot(
    name: str, title: str, hint: str | None = None, config: dict[str, Any] | None = None
) -> Any:
    """A card with the plot `name`; `plot_outputs` and `fill` belong to it."""
    settings = {
        "displaylogo": False,
        "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
        "toImageButtonOptions": {"format": "png", "filename": name, "scale": 2},
        "doubleClick": "autosize",
        "responsive": True,
        **(config or {}),
    }
    return card(
        title,
        html.Div(id=f"{name}-notice"),
        dcc.Store(id=f"{name}-fresh"),
        html.Div(
            dcc.Graph(id=name, figure=go.Figure(), config=settings, style={"height": "100%"}),
            id=f"{name}-place",
            style={"display": "none"},
            role="img",
            **{"aria-label": title},
        ),
        hint=hint,
    )


def plot_outputs(name: str) -> list[Output]:
    """The outputs of one plot, in the order of `fill`."""
    return [
        Output(f"{name}-fresh", "data"),
        Output(f"{name}-place", "style"),
        Output(f"{name}-notice", "children"),
    ]


def keep_zoom(app: Dash, *names: str) -> None:
    """Let the browser put each fresh figure in place, with the zoom that the reader has there."""
    for name in names:
        app.clientside_callback(
            ClientsideFunction("diag", "keep"),
            Output(name, "figure"),
            Input(f"{name}-fresh", "data"),
            State(name, "figure"),
        )


def fill(result: Drawn | Missing, keep: str) -> list[Any]:
    """Values for `plot_outputs`; zoom survives as long as `keep` stays the same."""
    if isinstance(result, Missing):
        return [None, {"display": "none"}, notice(result.what, result.how)]
    layout = result.figure.layout
    home = {n: list(layout[n].range) for n in ("xaxis", "yaxis") if layout[n].range is not None}
    layout.meta = {"keep": keep, "home": home}
    above = [
        dmc.Text(result.note, size="sm", c="dimmed") if result.note else None,
        *(legend(title, entries) for title, entries in result.legend),
    ]
    size = {"display": "block", "height": f"{layout.height}px"}
    return [result.figure, size, dmc.Stack(above, gap=6, mb="xs")]


def legend(title: str, entries: Sequence[tuple[str, str]]) -> Component:
    """Names beside their colours, in one line that wraps."""
    return html.Div(
        [
            html.Span(title, className="legend-title") if title else None,
            *(
                html.Span(
                    [html.Span(className="swatch", style={"backgroundColor": colour}), name],
                    className="legend-entry",
                )
                for name, colour in entries
            ),
        ],
        className="legend",
    )


def notice(what: str, how: str = "", color: str = "gray") -> Component:
    """Says what is missing and what would bring it."""
    return dmc.Alert(
        dmc.Text(marked(how), size="sm") if how else None,
        title=what,
        color=color,
        variant="light" if color != "gray" else "default",
    )


def code(text: str) -> Component:
    """A short piece of monospaced text that wraps."""
    return dmc.Code(text, className="wrap")


def marked(text: str) -> list[Any]:
    """Text in which what stands between `backticks` is code, as the report writes commands."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return [text]
    return [code(piece) if place % 2 else piece for place, piece in enumerate(pieces) if piece]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], label: str) -> Component:
    """A plain table; cells are text or components."""
    return dmc.TableScrollContainer(
        dmc.Table(
            [
                dmc.TableThead(dmc.TableTr([dmc.TableTh(h) for h in head])),
                dmc.TableTbody([dmc.TableTr([dmc.TableTd(c) for c in row]) for row in rows]),
            ],
            verticalSpacing="xs",
            highlightOnHover=True,
            **{"aria-label": label},
        ),
        minWidth=500,
    )


def facts(pairs: Sequence[tuple[str, Any]]) -> Component:
    """Names and values, one pair a row."""
    return html.Dl(
        [part for name, value in pairs for part in (html.Dt(name), html.Dd(value))],
        className="facts",
    )


def filter_bar(ranks: Sequence[int], chosen: Selection, span: tuple[int, int] | None) -> Component:
    """Choose ranks and steps; `span`: first and last step there is."""
    low, high = span or (0, 0)
    return dmc.Group(
        [
            dmc.MultiSelect(
                id="ranks",
                label="Ranks",
                data=rank_options(ranks),
                value=[str(r) for r in chosen.ranks or ()],
                placeholder="" if chosen.ranks else f"all {len(ranks)}",
                searchable=True,
                clearable=True,
                limit=200,
                w=340,
            ),
            *(
                dmc.NumberInput(
                    id=name,
                    label=label,
                    value="" if value is None else value,
                    placeholder=str(bound),
                    min=0,
                    allowDecimal=False,
                    allowNegative=False,
                    debounce=400,
                    w=120,
                )
                for name, label, value, bound in (
                    ("step-first", "From step", chosen.first, low),
                    ("step-last", "To step", chosen.last, high),
                )
            ),
        ],
        align="flex-end",
        gap="sm",
    )


def rank_options(ranks: Sequence[int]) -> list[dict[str, str]]:
    """Options of the rank filter."""
    return [{"value": str(r), "label": f"rank {r}"} for r in ranks]
