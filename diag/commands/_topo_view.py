"""How `diag topo` shows its answer: text, JSON (`diag.topo/1`), markdown, HTML.

In: topologies, checks, a placement. Out: text. Pure; only a check's severity is decided here.
"""

from __future__ import annotations

import html
import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from collectors.topology.draw import draw
from diag.commands import _output

if TYPE_CHECKING:
    from collectors.topology.graph import Topology
    from collectors.topology.placement import AxisPlacement, Placement
    from playbooks.finding import Finding

SCHEMA = "diag.topo/1"
_GROUPS = 4096
"""Groups of an axis that JSON lists."""
_COLOURS = {"fail": "red", "warn": "yellow", "info": "cyan"}


@dataclass
class View:
    """Everything that is shown."""

    topologies: list[Topology]
    checks: list[dict[str, Any]]
    placement: Placement | None
    better: list[tuple[str, ...]]
    notes: list[str]
    untold: list[str]
    """What could not be judged for want of a topology."""


def check_of(finding: Finding) -> dict[str, Any]:
    """A finding as a check: a root fails, what only comes with it warns."""
    from playbooks import knowledge

    cause = knowledge.cause(finding.cause)
    advice = [*finding.advice, *(a for a in cause.advice if a not in finding.advice)]
    return {
        "cause": finding.cause,
        "severity": "fail" if finding.role == "root" else "warn",
        "title": cause.title,
        "confidence": finding.confidence,
        "summary": finding.summary,
        "evidence": [
            {"source": i.source, "locator": i.locator, "quote": i.quote} for i in finding.evidence
        ],
        "advice": advice,
        "formula": finding.formula,
    }


def _node(topology: Topology) -> dict[str, Any]:
    return {
        "host": topology.host,
        "gpus": [
            {"name": g.name, "index": g.index, "model": g.model, "numa": g.numa}
            for g in topology.gpus
        ],
        "nics": [{"name": n.name, "device": n.device, "state": n.state} for n in topology.nics],
        "links": [
            {"a": x.a, "b": x.b, "kind": x.kind, "count": x.count, "bandwidth": x.bandwidth}
            for x in topology.links
        ],
    }


def _axis(placed: AxisPlacement) -> dict[str, Any]:
    return {
        "size": placed.size,
        "groups": [list(g.ranks) for g in placed.groups[:_GROUPS]],
        "worst_link": placed.worst,
        "crossing": len(placed.crossing),
    }


def _placement(view: View) -> dict[str, Any] | None:
    placed = view.placement
    if placed is None:
        return None
    return {
        "axes": {name: _axis(one) for name, one in placed.axes.items()},
        "shared": [
            {"link": f"node {s.node} {s.nic}", "axes": list(s.axes), "bytes": None}
            for s in placed.shared
        ],
        "better": [{"order": list(order)} for order in view.better],
    }


def as_json(view: View) -> dict[str, Any]:
    """The mapping of schema `diag.topo/1`."""
    return {
        "schema": SCHEMA,
        "nodes": [_node(t) for t in view.topologies],
        "checks": view.checks,
        "placement": _placement(view),
        "notes": [*view.notes, *view.untold],
    }


def _placement_lines(view: View) -> list[str]:
    placed = view.placement
    if placed is None:
        return []
    plan = placed.plan
    order = ", ".join(plan.order)
    nodes = f"{plan.nodes} node{'s' if plan.nodes != 1 else ''} of {plan.gpus_per_node} GPUs"
    lines = [f"{plan.source}: {plan.world} ranks on {nodes}, order [{order}]"]
    for name, one in placed.axes.items():
        groups = f"{len(one.groups)} group{'s' if len(one.groups) != 1 else ''}"
        leave = f"{len(one.crossing)} leave{'s' if len(one.crossing) == 1 else ''} the node"
        inside = "inside a node" if not one.crossing else leave
        lines.append(f"  {name + ' ' + str(one.size):8}{groups:12}{inside:20}worst {one.worst}")
    for axes in sorted({s.axes for s in placed.shared}):
        some = [s for s in placed.shared if s.axes == axes]
        where = ", ".join(f"node {s.node} {s.nic}" for s in some[:4])
        more = f" and {len(some) - 4} more" if len(some) > 4 else ""
        lines.append(f"  shared  {' and '.join(axes)} leave by {where}{more}")
    lines += [f"  better  order [{', '.join(o)}]" for o in view.better]
    return lines


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )


def _check_lines(check: dict[str, Any], width: int) -> list[str]:
    lines = [f"{check['severity'].upper():5} {check['cause']}  {check['confidence']}"]
    lines += _wrapped("      ", check["summary"], width)
    for number, item in enumerate(check["evidence"]):
        head = "  why   " if number == 0 else "        "
        lines += _wrapped(head, f"{item['source']} {item['locator']}: {item['quote']}", width)
    if check["formula"]:
        lines += _wrapped("  so    ", check["formula"], width)
    for number, advice in enumerate(check["advice"], 1):
        head = "  do    " if number == 1 else "        "
        lines += _wrapped(f"{head}{number}. ", advice, width)
    return lines


def _sections(view: View, width: int) -> list[list[str]]:
    parts = [draw(t) for t in view.topologies]
    parts.append(_placement_lines(view))
    parts += [_check_lines(c, width) for c in view.checks]
    if view.untold:
        parts.append([f"?     {u}" for u in view.untold])
    elif not view.checks:
        parts.append(["ok    no check failed"])
    parts.append([f"note  {n}" for n in view.notes])
    return [p for p in parts if p]


def text(view: View, *, colour: bool, width: int) -> str:
    """For people."""
    blocks = []
    for lines in _sections(view, width):
        shown = list(lines)
        word = shown[0].split(" ", 1)[0].lower()
        if colour and word in _COLOURS:
            shown[0] = click.style(shown[0], fg=_COLOURS[word], bold=True)
        blocks.append("\n".join(shown))
    return "\n\n".join(blocks)


def markdown(view: View) -> str:
    """For an issue or a chat: fenced, so that matrices keep their columns."""
    fence = "~" * 6
    return "\n".join(["# Topology", "", fence, text(view, colour=False, width=96), fence])


def page(view: View) -> str:
    """One HTML file that needs nothing else."""
    body = html.escape(text(view, colour=False, width=96))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>diag topo</title>"
        "<style>:root{color-scheme:light dark}body{margin:2rem auto;max-width:70rem;padding:0 1rem}"
        "pre{font:14px/1.45 ui-monospace,monospace;overflow-x:auto}</style></head>"
        f"<body><h1>Topology</h1><pre>{body}</pre></body></html>"
    )


def render(view: View, form: str, output: str | None) -> str:
    """The answer in one of the forms of `_output.FORMATS`."""
    if form == "json":
        return json.dumps(as_json(view), indent=2)
    if form == "md":
        return markdown(view)
    if form == "html":
        return page(view)
    colour = _output.wants_colour(output)
    return text(view, colour=colour, width=_output.terminal_width())
