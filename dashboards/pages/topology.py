"""Topology: GPUs, NICs and links of each node, with the groups of the plan laid over them.

In: the topologies and the plan of a View. Out: a graph of one node, and the groups as a table.
Without a topology the page says what is missing and how to get it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, html

from collectors.topology.graph import Gpu, Link, Nic, Topology
from dashboards.address import parse
from dashboards.figures.theme import Missing, theme_of
from dashboards.figures.topology import topology
from dashboards.parts import INPUTS, card, fill, keep_zoom, notice, plot, plot_outputs, table
from playbooks.words import spans

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from collectors.collected import Collected
    from collectors.topology.plan import Plan
    from dashboards.figures.selection import Selection
    from dashboards.runs import Runs, View

PATH = "/topology"
TITLE = "Topology"
ICON = "topology"
_GROUPS_SHOWN = 64
_NODES_SHOWN = 512
_HOW = (
    "Save `nvidia-smi topo -m > topo.txt` on a node and give it to `diag topo --from topo.txt "
    "--plan plan.yaml`, or to `diag analyze` together with the run's logs."
)


def nodes_of(collected: Collected) -> list[Topology]:
    """The topologies, or what the table of links says when it is all there is."""
    if collected.topologies:
        return collected.topologies
    by_host: dict[str, list[Link]] = {}
    for row in collected.rows("links"):
        link = Link(row["a"], row["b"], row["kind"], row["count"], row["bandwidth"])
        by_host.setdefault(row["host"] or "node", []).append(link)
    out = []
    for host, links in by_host.items():
        ends = dict.fromkeys(e for link in links for e in (link.a, link.b) if e is not None)
        gpus = [e for e in ends if e.upper().startswith("GPU")]
        out.append(
            Topology(
                host,
                tuple(Gpu(name, i) for i, name in enumerate(gpus)),
                tuple(Nic(e) for e in ends if e not in gpus),
                tuple(links),
                "table links",
            )
        )
    return out


def layout(view: View, chosen: Selection) -> Component:  # noqa: ARG001
    """The skeleton; the callbacks fill it."""
    nodes = nodes_of(view.collected)
    if not nodes:
        return card("Topology", notice("This run has no topology of its nodes.", _HOW))
    plan = view.collected.plan
    axes = [] if plan is None else [a for a in plan.order if plan.sizes[a] > 1]
    return dmc.Stack(
        [
            dmc.Group(
                [
                    dmc.Select(
                        id="node",
                        label="Node",
                        data=_options(nodes, plan),
                        value="0",
                        allowDeselect=False,
                        w=320,
                    ),
                    html.Div(
                        [
                            dmc.Text("Groups of the plan", size="sm", fw=500, mb=4),
                            dmc.SegmentedControl(
                                id="axis",
                                data=[
                                    {"value": "", "label": "none"},
                                    *({"value": a, "label": a} for a in axes),
                                ],
                                value=axes[-1] if axes else "",
                            ),
                        ],
                        style={} if axes else {"display": "none"},
                    ),
                ],
                align="flex-end",
            ),
            plot(
                "topology",
                "GPUs, NICs and the links between them",
                "One line a link, coloured by what it crosses; the GPUs' colour is their group.",
                {"scrollZoom": False},
            ),
            html.Div(id="placement"),
        ],
        gap="md",
    )


def _options(nodes: list[Topology], plan: Plan | None) -> list[dict[str, str]]:
    """The nodes to choose from: one file often stands for all nodes of a plan, which are alike."""
    if plan is not None and len(nodes) == 1 and plan.nodes > 1:
        count = min(plan.nodes, _NODES_SHOWN)
        return [
            {"value": str(i), "label": f"node {i} of {plan.nodes}, drawn as {nodes[0].host}"}
            for i in range(count)
        ]
    return [{"value": str(i), "label": n.host} for i, n in enumerate(nodes)]


def register(app: Dash, runs: Runs) -> None:
    """Install the callbacks of this page."""

    def draw(
        search: str | None, _version: Any, scheme: str | None, node: str | None, axis: str | None
    ) -> list[Any]:
        key = runs.find(parse(PATH, search).run) or runs.keys()[0]
        collected = runs.view(key).collected
        nodes = nodes_of(collected)
        index = int(node) if node and node.isdecimal() and len(node) < 7 else 0
        if not nodes:
            return [*fill(Missing("This run has no topology of its nodes.", _HOW), key), None]
        plan = collected.plan
        on = axis if plan is not None and axis in plan.sizes else None
        drawn = topology(nodes[min(index, len(nodes) - 1)], theme_of(scheme), plan, on, index)
        below = None if plan is None or on is None else placement(plan, on)
        return [*fill(drawn, f"{key} {index}"), below]

    app.callback(
        [*plot_outputs("topology"), Output("placement", "children")],
        *INPUTS,
        Input("node", "value"),
        Input("axis", "value"),
    )(draw)
    keep_zoom(app, "topology")


def placement(plan: Plan, axis: str) -> Component:
    """Where each group of an axis runs."""
    groups = plan.groups(axis)
    rows = []
    for number, group in enumerate(groups[:_GROUPS_SHOWN]):
        on = sorted({plan.node_of(r) for r in group})
        rows.append([str(number), spans(group), ", ".join(str(n) for n in on)])
    more = len(groups) - len(rows)
    return card(
        f"Groups of {axis}",
        table(["group", "ranks", "nodes"], rows, f"groups of {axis}"),
        dmc.Text(f"and {more} more groups", size="sm", c="dimmed", mt="xs") if more > 0 else None,
        hint=f"{len(groups)} groups of {plan.sizes[axis]} ranks, as {plan.source} says.",
    )
