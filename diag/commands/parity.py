"""`diag parity`: is a parallel configuration of the trainer equal to one process?

In: the trainer's own settings, or --matrix; a model of your own with --model. Out: a row a layout:
equal or not, the worst relative difference, and the first module and parameter that differs.
Everything runs on gloo ranks of this machine, which live on between layouts. Exit codes: 0 equal,
1 not, 2 settings or a model that cannot work.
"""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from diag.commands import _output

if TYPE_CHECKING:
    from trainer.parity.proof import Row

DTYPES = ("float64", "float32", "bfloat16")


@click.command("parity", short_help="prove a parallel config equal to one process")
@click.argument("settings", nargs=-1, metavar="[section.key=value]...")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="the trainer's TOML")
@click.option("--matrix", is_flag=True, help="every axis alone, every pair, and some threes")
@click.option(
    "--model",
    metavar="FILE.py[:FACTORY]",
    help="a model of your own (trainer/examples/gpt.py shows one); the file is run",
)
@click.option("--layers", is_flag=True, help="compare the outputs of every module too")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=DTYPES[0],
    show_default=True,
    help="arithmetic; below float64 only faults larger than its rounding are seen",
)
@click.option("--ranks", type=click.IntRange(1, 64), help="ranks; default: what the axes ask for")
@_output.options_of("text", "json", "md")
def command(
    settings: tuple[str, ...],
    config: str | None,
    matrix: bool,
    model: str | None,
    layers: bool,
    dtype: str,
    ranks: int | None,
    form: str,
    output: str | None,
) -> int:
    """Compare loss, gradients, norms and weights of three steps with those of one process."""
    from trainer.config import ConfigError
    from trainer.parity.proof import prove

    rows: list[Row] = []
    try:
        cases = _cases(settings, config, model, matrix=matrix, ranks=ranks)
        began = time.monotonic()
        for row in prove(cases, dtype, layers=layers):
            rows.append(row)
            _progress(rows, len(cases), time.monotonic() - began)
        if all(row.refused for row in rows):
            raise ConfigError(list(rows[0].refused))
    except ConfigError as error:
        raise click.UsageError("; ".join(error.problems)) from error
    _output.write(_answer(rows, dtype, form), output)
    return 0 if all(row.first is None for row in rows) else 1


def _cases(
    settings: tuple[str, ...],
    config: str | None,
    model: str | None,
    *,
    matrix: bool,
    ranks: int | None,
) -> list[tuple[tuple[str, ...], int]]:
    """(settings, ranks) of each run; without a config the model is a small one."""
    from trainer.parity import matrix as layouts
    from trainer.parity.cases import SMALL
    from trainer.parity.proof import ranks_of

    base = ("--config", config) if config else SMALL
    settings = (*settings, f"model.file={model}") if model else settings
    if matrix:
        fitting = [one for one in layouts.matrix() if not (model and _of_own_model(one))]
        each = [(*base, *settings, *layout) for layout in fitting]
    else:
        each = [(*base, *settings)]
    return [(one, ranks if ranks and not matrix else ranks_of(one)) for one in each]


def _of_own_model(layout: tuple[str, ...]) -> bool:
    """Whether a layout of the matrix is about parts of the trainer's own model, such as experts."""
    return any(setting.startswith("model.") for setting in layout)


def _progress(rows: list[Row], total: int, seconds: float) -> None:
    """One line on a terminal, written over: how many are done, how long the rest may take."""
    if total == 1 or not sys.stderr.isatty():
        return
    left = seconds / len(rows) * (total - len(rows))
    told = f"{len(rows)}/{total}  {left // 60:.0f}:{left % 60:02.0f} left  {_name(rows[-1])}"
    wide = _output.terminal_width() - 1
    click.echo(f"\r{told[:wide]:<{wide}}", err=True, nl=len(rows) == total)


def _answer(rows: list[Row], dtype: str, form: str) -> str:
    if form == "json":
        told: dict[str, Any] = {"schema": "diag.parity/1", "dtype": dtype}
        return _output.as_text(told | {"rows": [row.as_json() for row in rows]})
    if form == "md":
        lines = ["| layout | equal | worst relative | first difference |", "|---|---|---|---|"]
        lines += [f"| {_name(row)} | {' | '.join(_cells(row))} |" for row in rows]
        return "\n".join(lines) + "\n"
    ran = [row for row in rows if not row.refused]
    equal = sum(row.first is None for row in ran)
    wide = max(len(_name(row)) for row in rows)
    refused = f"; {len(rows) - len(ran)} refused" if len(ran) < len(rows) else ""
    lines = [f"  {equal} of {len(ran)} layout(s) equal one process in {dtype}{refused}", ""]
    lines += [f"  {_name(row):<{wide}}  {_line(row)}" for row in rows]
    left = sorted({re.sub(r"\.\d+\b", ".*", one) for row in rows for one in row.left_out})
    if left:
        lines += ["", f"  not compared: {', '.join(left)}"]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, str, str]:
    if row.refused:
        return "refused", "", "; ".join(row.refused)
    return "no" if row.first else "yes", f"{row.worst:.1e}", str(row.first or "")


def _line(row: Row) -> str:
    if row.refused:
        return f"refused    {'; '.join(row.refused)}"
    if row.first is not None:
        hint = "" if row.first.module or row.modules is not None else " (--layers names the module)"
        return f"NOT EQUAL  {row.first}{hint}"
    modules = f"  {row.modules} modules" if row.modules is not None else ""
    return f"equal      worst {row.worst:.1e}{modules}  {row.seconds:5.1f} s"


def _name(row: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in row.layout.items()) or "one process"
