"""`diag parity`: is a parallel configuration of the trainer equal to one process?

In: the trainer's own settings, or --matrix. Out: a row a layout: equal or not, the worst relative
difference, and the first module and parameter that differs. Everything runs in float64 on gloo
ranks of this machine, which live on between layouts. Exit codes: 0 equal, 1 not, 2 bad settings.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from diag.commands import _output

if TYPE_CHECKING:
    from trainer.parity.proof import Row


@click.command("parity", short_help="prove a parallel config equal to one process")
@click.argument("settings", nargs=-1, metavar="[section.key=value]...")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="the trainer's TOML")
@click.option("--matrix", is_flag=True, help="every axis alone, every pair, and some threes")
@click.option("--ranks", type=click.IntRange(1, 64), help="ranks; default: what the axes ask for")
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "json", "md")),
    default="text",
    show_default=True,
    help="form of the answer",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="write to FILE")
def command(
    settings: tuple[str, ...],
    config: str | None,
    matrix: bool,
    ranks: int | None,
    form: str,
    output: str | None,
) -> int:
    """Compare loss, gradients, norms and weights of three steps with those of one process."""
    from trainer.config import ConfigError
    from trainer.parity.proof import prove

    try:
        rows = []
        cases = _cases(settings, config, matrix=matrix, ranks=ranks)
        for row in prove(cases):
            rows.append(row)
            if sys.stderr.isatty() and len(cases) > 1:
                click.echo(f"\r{len(rows)}/{len(cases)} {_line(row):<70}", err=True, nl=False)
    except ConfigError as error:
        raise click.UsageError("; ".join(error.problems)) from error
    if sys.stderr.isatty() and len(cases) > 1:
        click.echo("", err=True)
    _output.write(_answer(rows, form), output)
    return 0 if all(row.first is None for row in rows) else 1


def _cases(
    settings: tuple[str, ...], config: str | None, *, matrix: bool, ranks: int | None
) -> list[tuple[tuple[str, ...], int]]:
    """(settings, ranks) of each run; without a config the model is a small one."""
    from trainer.parity import matrix as layouts
    from trainer.parity.proof import SMALL, ranks_of

    base = ("--config", config) if config else SMALL
    if matrix:
        each = [(*base, *settings, *layout) for layout in layouts.matrix()]
    else:
        each = [(*base, *settings)]
    return [(one, ranks if ranks and not matrix else ranks_of(one)) for one in each]


def _answer(rows: list[Row], form: str) -> str:
    if form == "json":
        told: dict[str, Any] = {"schema": "diag.parity/1", "dtype": "float64"}
        return json.dumps(told | {"rows": [row.as_json() for row in rows]}, indent=2)
    if form == "md":
        lines = ["| layout | equal | worst relative | first difference |", "|---|---|---|---|"]
        lines += [
            f"| {_name(row)} | {'no' if row.first else 'yes'} | {row.worst:.1e} "
            f"| {row.first or ''} |"
            for row in rows
        ]
        return "\n".join(lines) + "\n"
    equal = sum(row.first is None for row in rows)
    wide = max(len(_name(row)) for row in rows)
    lines = [f"  {equal} of {len(rows)} layout(s) equal one process in float64", ""]
    lines += [f"  {_name(row):<{wide}}  {_line(row)}" for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    if row.first is None:
        return f"equal      worst {row.worst:.1e}  {row.seconds:5.1f} s"
    return f"NOT EQUAL  {row.first}"


def _name(row: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in row.layout.items()) or "one process"
