"""The report as cards: verdict, health or abstention, and what else was found.

In: a Report. Out: components. Every word of judgement here comes out of the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import html

from dashboards.parts import card, code, marked
from playbooks.report.plain import numbers
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from playbooks.finding import Abstention, Finding, Item
    from playbooks.report.model import Report

CONFIDENCE = {"certain": "red", "likely": "orange", "possible": "yellow"}


def answer(report: Report) -> Component:
    """The one answer of the report, as a card."""
    if report.verdict is not None:
        return _verdict(report.verdict, report)
    if report.abstained is not None:
        return _abstained(report.abstained)
    summary = report.health.summary if report.health is not None else ""
    return card(
        None,
        dmc.Badge("healthy", color="teal", variant="light", mb="xs"),
        dmc.Title(summary, order=2, className="summary"),
        _tiles(report.metrics),
        className="answer answer-healthy",
    )


def _tiles(metrics: dict[str, Any]) -> Component | None:
    """Numbers of the report, each with its name; what is not known has no tile."""
    shown = numbers(metrics)
    if not shown:
        return None
    return html.Div(
        [
            html.Div(
                [html.Div(value, className="tile-value"), html.Div(name, className="tile-name")],
                className="tile",
            )
            for name, value in shown
        ],
        className="tiles",
    )


def _verdict(found: Finding, report: Report) -> Component:
    effects = [f for f in report.findings if f.role == "effect"]
    return card(
        None,
        dmc.Group(
            [
                dmc.Badge(found.confidence, color=CONFIDENCE[found.confidence], variant="light"),
                *_tags(found),
            ],
            gap="xs",
            mb="xs",
        ),
        dmc.Title(found.summary, order=2, className="summary"),
        dmc.Text(report.titles.get(found.cause, found.cause), c="dimmed", size="sm", mt=4),
        _section("Why", [_item(i) for i in found.evidence]),
        _section("Formula", [code(found.formula)] if found.formula else []),
        _section(
            "Not",
            [dmc.Text([code(cause), " ", why], size="sm") for cause, why in found.excluded],
        ),
        _section(
            "Do",
            [dmc.List([dmc.ListItem(marked(a)) for a in found.advice], type="ordered", size="sm")]
            if found.advice
            else [],
        ),
        _section("Also", [_effect(f) for f in effects[:20]]),
        className="answer answer-verdict",
    )


def _abstained(said: Abstention) -> Component:
    return card(
        None,
        dmc.Badge("no verdict", color="yellow", variant="light", mb="xs"),
        dmc.Title(said.because, order=2, className="summary"),
        _section(
            "Would decide", [dmc.List([dmc.ListItem(marked(n)) for n in said.need], size="sm")]
        )
        if said.need
        else None,
        className="answer answer-abstained",
    )


def _tags(found: Finding) -> list[Any]:
    tags = [code(found.cause)]
    if found.where:
        tags.append(dmc.Text(f"where: {found.where}", size="sm"))
    if found.ranks:
        tags.append(dmc.Text(ranks_words(found.ranks), size="sm"))
    if found.group:
        tags.append(dmc.Text(f"group {found.group}", size="sm"))
    elif found.axis:
        tags.append(dmc.Text(f"axis {found.axis}", size="sm"))
    return tags


def _section(title: str, children: list[Any]) -> Component | None:
    if not children:
        return None
    return html.Div(
        [html.Div(title, className="section-name"), html.Div(children)], className="section"
    )


def _item(item: Item) -> Component:
    place = " · ".join(part for part in (item.source, item.locator) if part)
    return html.Div(
        [html.Div(item.quote, className="quote"), html.Div(place, className="place")],
        className="evidence",
    )


def _effect(found: Finding) -> Component:
    return dmc.Text([found.summary], size="sm", className="effect")


def others(report: Report) -> Component | None:
    """What was found besides the verdict and its effects; None when nothing was."""
    rest = [f for f in report.findings if f is not report.verdict and f != report.verdict]
    if report.verdict is not None:
        rest = [f for f in rest if f.role != "effect"]
    if not rest:
        return None
    return card(
        "Also found",
        dmc.Stack(
            [
                html.Div(
                    [
                        dmc.Group(
                            [dmc.Badge(f.role, color="gray", variant="light"), *_tags(f)], gap="xs"
                        ),
                        dmc.Text(f.summary, size="sm", mt=4),
                        _section("Why", [_item(i) for i in f.evidence[:5]]),
                    ]
                )
                for f in rest[:50]
            ],
            gap="md",
        ),
        dmc.Text(marked(f"and {len(rest) - 50} more, see `diag report`"), size="sm", c="dimmed")
        if len(rest) > 50
        else None,
    )
