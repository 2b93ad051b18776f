"""`diag compare A B`: what changed between two runs, and whether it matters.

In: two run directories, or folders of loose artifacts; A is the one that is known. Out: the facts
that differ, numbers with an interval of their ratio, and one sentence. Exit codes: 0; with
`--fail-on regression` 1 when B is worse beyond noise or has a root cause that A lacks; 2 bad input.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from diag.commands import _output, _runs

if TYPE_CHECKING:
    from playbooks.comparison import Comparison, Side


@click.command("compare", short_help="what changed between two runs")
@click.argument("a", type=click.Path(path_type=Path), metavar="A")
@click.argument("b", type=click.Path(path_type=Path), metavar="B")
@_output.options
@click.option(
    "--fail-on", "fail", type=click.Choice(("regression",)), help="exit 1 when B is worse than A"
)
def command(a: Path, b: Path, form: str, output: str | None, fail: str | None) -> int:
    """Compare two runs: layout, command, code, versions, environment, numbers, verdicts."""
    from playbooks.comparison import compare
    from playbooks.policy import Policy

    found = compare(_side(a), _side(b), Policy())
    _output.write(_shown(found, form, output), output)
    return 1 if fail == "regression" and found.regression else 0


def _side(path: Path) -> Side:
    from playbooks.comparison import Side
    from playbooks.engine import diagnose
    from playbooks.evidence import Evidence

    collected = _runs.anything(path)
    return Side(str(path), Evidence(collected), diagnose(collected))


def _shown(found: Comparison, form: str, output: str | None) -> str:
    from playbooks.report import compared

    if form == "json":
        return _output.as_text(found.as_json())
    if form == "md":
        return compared.render_markdown(found)
    if form == "html":
        return compared.render_html(found)
    colour = _output.wants_colour(output)
    return compared.render_text(found, colour, _output.terminal_width())
