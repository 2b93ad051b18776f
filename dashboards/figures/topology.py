"""A node's GPUs and NICs as a graph, with the groups of a plan laid over it.

In: one Topology, perhaps a Plan and an axis, and which node of the plan this is. Out: GPUs on a
ring, each NIC outside the GPU that is nearest to it, one line a link, coloured by its kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from collectors.topology.graph import KINDS, Link, Topology
from dashboards.figures.palette import line_colour, link_colour
from dashboards.figures.theme import Drawn, Missing, Theme, finish, ink, plain

if TYPE_CHECKING:
    from collectors.topology.plan import Plan

CROWDED = 40
"""Above this many links the far kinds (host bridge and farther) start hidden in the legend."""

_Point = tuple[float, float]


def places(node: Topology) -> dict[str, _Point]:
    """Where each GPU and NIC stands; unit ring for GPUs, NICs outside of it."""
    out: dict[str, _Point] = {}
    angle: dict[str, float] = {}
    for i, gpu in enumerate(node.gpus):
        angle[gpu.name] = math.pi / 2 - 2 * math.pi * (i + 0.5) / max(1, len(node.gpus))
        out[gpu.name] = (math.cos(angle[gpu.name]), math.sin(angle[gpu.name]))
    beside: dict[float, list[str]] = {}
    for i, nic in enumerate(node.nics):
        near = [
            (KINDS.get(link.kind, len(KINDS)), gpu.index, gpu.name)
            for gpu in node.gpus
            if (link := node.link(nic.name, gpu.name)) is not None
        ]
        at = angle[min(near)[2]] if near else -2 * math.pi * i / len(node.nics)
        beside.setdefault(at, []).append(nic.name)
    step = 2 * math.pi / max(10, 2 * len(node.nics))
    for at, names in beside.items():
        for i, name in enumerate(names):
            turned = at - (i - (len(names) - 1) / 2) * step
            out[name] = (1.5 * math.cos(turned), 1.5 * math.sin(turned))
    return out


def _label(link: Link) -> str:
    text = f"{plain(link.a)} to {plain(link.b)}: {plain(link.kind)}"
    if link.count:
        text += f" x {link.count}"
    if link.bandwidth:
        text += f", {link.bandwidth / 1e9:.4g} GB/s each way"
    return text


def _links(fig: go.Figure, node: Topology, at: dict[str, _Point]) -> str:
    """Draw the links, one trace a kind; returns the note when some start hidden."""
    drawn = [link for link in node.links if link.a in at and link.b in at and link.a != link.b]
    kinds = sorted({link.kind for link in drawn}, key=lambda k: KINDS.get(k, len(KINDS)))
    far = KINDS["host-bridge"]
    crowded = len(drawn) > CROWDED and any(KINDS.get(k, far) < far for k in kinds)
    hidden = []
    for kind in kinds:
        some = [link for link in drawn if link.kind == kind]
        xs: list[float | None] = []
        ys: list[float | None] = []
        for link in some:
            (ax, ay), (bx, by) = at[link.a], at[link.b]
            # Five points along the line, so that pointing anywhere at it finds one.
            along = [j / 4 for j in range(5)]
            xs += [*(ax + (bx - ax) * t for t in along), None]
            ys += [*(ay + (by - ay) * t for t in along), None]
        nearness = KINDS.get(kind, len(KINDS))
        hide = crowded and nearness >= far
        if hide:
            hidden.append(kind)
        fig.add_scatter(
            x=xs,
            y=ys,
            mode="lines",
            name=f"{plain(kind)} ({len(some)})",
            line={"color": link_colour(kind), "width": max(1.0, 3.4 - 0.6 * nearness)},
            opacity=0.8,
            hovertext=[t for link in some for t in [_label(link)] * 6],
            hoverinfo="text",
            visible="legendonly" if hide else True,
        )
    if not hidden:
        return ""
    return f"Hidden to keep the picture readable: {', '.join(hidden)}. The legend shows them."


def _overlay(node: Topology, plan: Plan, axis: str, index: int) -> dict[str, tuple[int, str]]:
    """GPU name -> (number of its group on the axis, ranks on it as text)."""
    group_of = {r: i for i, g in enumerate(plan.groups(axis)) for r in g}
    out: dict[str, tuple[int, str]] = {}
    for rank in range(plan.world):
        if plan.node_of(rank) != index:
            continue
        for gpu in node.gpus:
            if gpu.index == plan.gpu_of(rank):
                out[gpu.name] = (group_of.get(rank, 0), f"rank {rank}")
    return out


def _marks(
    fig: go.Figure, node: Topology, at: dict[str, _Point], groups: dict[str, tuple[int, str]]
) -> None:
    gpus = [g for g in node.gpus if g.name in at]
    fig.add_scatter(
        x=[at[g.name][0] for g in gpus],
        y=[at[g.name][1] for g in gpus],
        mode="markers+text",
        name="GPU",
        showlegend=False,
        text=[
            f"<b>{plain(g.name)}</b>" + (f"<br>{groups[g.name][1]}" if g.name in groups else "")
            for g in gpus
        ],
        textfont={"color": "#ffffff", "size": 11},
        marker={
            "size": 54,
            "symbol": "square",
            "opacity": 1,
            "color": [_dark(groups[g.name][0]) if g.name in groups else "#5c6773" for g in gpus],
        },
        hovertext=[
            "<br>".join(
                [
                    f"<b>{plain(g.name)}</b>",
                    *([] if g.model is None else [plain(g.model)]),
                    *([] if g.numa is None else [f"NUMA node {g.numa}"]),
                    *([] if g.cpu_affinity is None else [f"CPUs {plain(g.cpu_affinity)}"]),
                ]
            )
            for g in gpus
        ],
        hoverinfo="text",
    )
    nics = [n for n in node.nics if n.name in at]
    fig.add_scatter(
        x=[at[n.name][0] for n in nics],
        y=[at[n.name][1] for n in nics],
        mode="markers+text",
        name="NIC",
        showlegend=False,
        text=[plain(n.name) for n in nics],
        textposition=["top center" if at[n.name][1] > 0 else "bottom center" for n in nics],
        marker={"size": 22, "symbol": "diamond", "opacity": 1, "color": "#8A6FC2"},
        hovertext=[
            f"<b>{plain(n.name)}</b>"
            + ("" if n.device is None else f"<br>{plain(n.device)}")
            + ("" if n.rate is None else f"<br>{n.rate / 1e9:.4g} GB/s each way")
            + ("" if n.state is None else f"<br>{plain(n.state)}")
            for n in nics
        ],
        hoverinfo="text",
    )


def _dark(group: int) -> str:
    """A group's colour; the light ones of the series would not carry white text."""
    dark = ("#2378B5", "#B0660A", "#00795A", "#A4497B", "#6B55A8", "#B34A00", "#3F6E8C", "#7F5B36")
    return dark[group % len(dark)] if group >= 0 else line_colour(0)


def topology(
    node: Topology, theme: Theme, plan: Plan | None = None, axis: str | None = None, index: int = 0
) -> Drawn | Missing:
    """The graph of one node; `axis` of `plan` colours its GPUs by group."""
    at = places(node)
    if not at:
        return Missing("This topology names no GPU and no NIC.")
    groups = {} if plan is None or axis is None else _overlay(node, plan, axis, index)
    fig = go.Figure()
    note = _links(fig, node, at)
    _marks(fig, node, at, groups)
    blank = {"visible": False, "fixedrange": True}
    reach = 1.8 if node.nics else 1.3
    finish(
        fig,
        theme,
        600,
        dragmode=False,
        xaxis={**blank, "range": [-1.35 * reach, 1.35 * reach]},
        yaxis={**blank, "range": [-reach, reach], "scaleanchor": "x"},
        font_color=ink(theme),
    )
    return Drawn(fig, note)
