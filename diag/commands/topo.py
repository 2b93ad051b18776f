"""`diag topo`: a node's GPU and NIC topology, drawn and checked; with a plan also its placement.

In: topology files (`--from`), else what this node's nvidia-smi says, and perhaps a plan. Out:
`diag.topo/1` as text, JSON, markdown or HTML. Exit 0 fine, 1 a check failed, 2 cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from diag.commands import _output, _topo_view

if TYPE_CHECKING:
    from collectors.collected import Collected, Source
    from collectors.topology.graph import Topology
    from collectors.topology.placement import Placement
    from collectors.topology.plan import Plan


@dataclass
class _Known:
    """What there is to judge."""

    topologies: list[Topology]
    plan: Plan | None
    notes: list[str] = field(default_factory=list)


def _refused(sources: list[Source]) -> None:
    """A file that was named and gave nothing ends the command."""
    for source in sources:
        if source.read == "none":
            why = "; ".join(source.problems) or "not readable"
            raise click.UsageError(f"{source.path}: {why}")


def _ask_node(known: _Known) -> None:
    """Take this node's own topology, or note why there is none."""
    from collectors.topology.local import local

    reading = local()
    if reading is None:
        known.notes.append("no nvidia-smi on this machine; give a topology with --from FILE")
    elif not reading.topologies:
        why = reading.source.problems[0] if reading.source.problems else "it shows no GPU"
        known.notes.append(f"{reading.source.path}: {why}; give a topology with --from FILE")
    else:
        known.topologies = reading.topologies


def _read(sources: tuple[str, ...], plan: str | None) -> _Known:
    from collectors.readers import read_paths

    wanted = [*sources, *([plan] if plan else [])]
    collected: Collected = read_paths(wanted) if wanted else read_paths(())
    _refused(collected.sources)
    known = _Known(collected.topologies, collected.plan)
    if plan and collected.plan is None:
        raise click.UsageError(f"{plan}: not a plan; it needs `world:` and the size of each axis")
    if sources and not known.topologies:
        raise click.UsageError(f"{sources[0]}: no topology in it; `nvidia-smi topo -m` prints one")
    for source in collected.sources:
        known.notes += [f"{source.path}: {problem}" for problem in source.problems]
    if not sources:
        _ask_node(known)
    return known


def _untold(placement: Placement) -> list[str]:
    """What the placement cannot tell because no topology describes it."""
    tp = placement.axes.get("tp")
    if tp is None or tp.crossing or not any("unknown" in g.kinds for g in tp.groups):
        return []
    return ["tp stays inside nodes; no topology says whether NVLink joins its GPUs there"]


@click.command("topo")
@click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=True),
    help="read topologies from FILE instead of this node (may be repeated)",
)
@click.option(
    "--plan",
    metavar="PLAN.yaml",
    type=click.Path(exists=True, dir_okay=False),
    help="judge where this plan's groups would lie",
)
@_output.options
def command(sources: tuple[str, ...], plan: str | None, form: str, output: str | None) -> int:
    """Draw and check GPU and NIC topology; with --plan, before launch."""
    from collectors.topology.placement import better_orders, lay
    from playbooks.policy import Policy
    from playbooks.rules import link

    known = _read(sources, plan)
    if not known.topologies and known.plan is None:
        raise click.UsageError("; ".join(known.notes))
    findings = link.check(known.topologies, known.plan, Policy())
    placement = None if known.plan is None else lay(known.plan, known.topologies)
    better = [] if known.plan is None or not findings else better_orders(known.plan)
    untold = [] if placement is None else _untold(placement)
    view = _topo_view.View(
        known.topologies,
        [_topo_view.check_of(f) for f in findings],
        placement,
        better,
        known.notes,
        untold,
    )
    _output.write(_topo_view.render(view, form, output), output)
    if any(c["severity"] == "fail" for c in view.checks):
        return 1
    return 2 if untold else 0
