"""`diag bench NAME`: measure ourselves. Exit 0; goals that are missed are said, not failed."""

from __future__ import annotations

import importlib
import json

import click

from diag.commands._output import options_of, write

NAMES = {
    "overhead": "what being watched costs a job",
    "trainer": "the trainer's tokens/s over those of the same training in plain torch",
}

_JUDGED = {True: "met", False: "missed", None: "open: the interval has both sides"}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


@click.command("bench", short_help="measure ourselves")
@click.argument("name", type=click.Choice(list(NAMES)), default="overhead")
@click.option("--rounds", type=click.IntRange(min=2), default=7, show_default=True)
@options_of("text", "json")
def command(name: str, rounds: int, form: str, output: str | None) -> int:
    """Measure NAME; each comparison is interleaved and repeated ROUNDS times."""
    from diag.bench.rows import machine

    rows = importlib.import_module(f"diag.bench.{name}").measure(rounds)
    where = machine()
    if form == "json":
        body = {
            "schema": "diag.bench/1",
            "name": name,
            "machine": where,
            "rows": [row.as_json() for row in rows],
        }
        write(json.dumps(body, indent=2), output)
        return 0
    lines = [f"{NAMES[name]}; {', '.join(f'{k} {v}' for k, v in where.items())}"]
    for row in rows:
        bounds = "" if row.low is None else f"  [{_number(row.low)}, {_number(row.high)}]"
        goal = ""
        if row.goal is not None:
            goal = f"  goal {_number(row.goal)}: {_JUDGED[row.met]}"
        lines.append(f"  {row.case:44} {_number(row.value):>8} {row.unit:3}{bounds}{goal}")
    write("\n".join(lines), output)
    return 0
