"""`diag demo`: see a verdict on a job whose truth is known. Exit 0 when the verdict names it."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diag import demo

if TYPE_CHECKING:
    from diag.demo import Placed, Result


def _layout(text: str) -> dict[str, int]:
    """`tp=2 pp=2` as a mapping."""
    out: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        axis, _, size = word.partition("=")
        if axis not in ("dp", "tp", "pp", "cp", "ep") or not size.isdigit() or int(size) < 1:
            raise click.UsageError(f'--layout "tp=2 pp=2" sets dp, tp, pp, cp and ep; not {word!r}')
        out[axis] = int(size)
    return out


def _case(name: str | None) -> demo.Case:
    chosen = name or "healthy"
    if chosen not in demo.CASES:
        near = difflib.get_close_matches(chosen, demo.CASES, 1)
        hint = f"did you mean `diag demo {near[0]}`?" if near else "see `diag demo --list`"
        raise click.UsageError(f"there is no fault {chosen!r}; {hint}")
    return demo.CASES[chosen]


def _one(placed: Placed, run_dir: Path | None) -> tuple[Result, Path] | None:
    if placed.case.name == "bad-topology-plan":
        where = demo.judge_plan(run_dir)
    else:
        made = demo.run(placed, run_dir)
        if made is None:
            return None
        where = made
    try:
        answer = json.loads((where / "report.json").read_text())
        run_file = where / "run.json"
        facts = json.loads(run_file.read_text()) if run_file.exists() else {}
    except (OSError, ValueError) as wrong:
        raise click.ClickException(f"no report in {where}: {wrong}") from wrong
    return demo.hold(placed, answer, facts), where


def _say(placed: Placed, result: Result, where: Path) -> None:
    done = placed.case.does
    if placed.case.placed:
        done += f": rank {placed.rank}, step {placed.step} (seed {placed.seed})"
    verdict = "right" if result.right else f"WRONG, it was {placed.case.cause or 'healthy'}"
    late = "" if result.seconds is None else f", {result.seconds:.1f} s after the last progress"
    click.echo(f"demo {placed.case.name}: {done}")
    click.echo(f"  said: {result.said}{late}: {verdict}")
    click.echo(f"  report: {where / 'report.html'}")


def _all(layout: str | None, seed: int) -> int:
    """Every case in a process of its own, since each takes over the signals."""
    failed = []
    for name in demo.CASES:
        words = [
            sys.executable,
            "-m",
            "diag",
            "demo",
            name,
            "--seed",
            str(seed),
            *(["--layout", layout] if layout else []),
        ]
        done = subprocess.run(words, check=False, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE)
        lines = done.stdout.decode(errors="replace").splitlines()
        start = next((i for i, x in enumerate(lines) if x.startswith("demo ")), len(lines))
        click.echo("\n".join(lines[start:]) or f"demo {name}: no answer, exit {done.returncode}")
        if done.returncode:
            failed.append(name)
    click.echo(f"{len(demo.CASES) - len(failed)} of {len(demo.CASES)} right")
    return 1 if failed else 0


@click.command("demo", short_help="the bundled trainer under watch, healthy or with one fault")
@click.argument("fault", required=False)
@click.option("--list", "names", is_flag=True, help="name the faults and end")
@click.option("--all", "everything", is_flag=True, help="every fault, one after another")
@click.option("--run-dir", type=click.Path(path_type=Path), help="where the run is kept")
@click.option(
    "--layout",
    help="sizes of the axes dp, tp, pp, cp and ep [default: tp=2 pp=2, or what the fault needs]",
)
@click.option("--seed", default=0, show_default=True, help="places the fault: rank and step")
def command(
    fault: str | None,
    names: bool,
    everything: bool,
    run_dir: Path | None,
    layout: str | None,
    seed: int,
) -> int:
    """Train the bundled model on 4 CPU ranks under `diag run`, with FAULT or without.

    Exit 0 when the verdict names the fault and its rank, 1 when it does not.
    """
    if names:
        for case in demo.CASES.values():
            click.echo(f"{case.name:22} {case.does:62} {case.cause or 'health'}")
        return 0
    if everything:
        if fault or run_dir:
            raise click.UsageError("--all takes neither a fault nor --run-dir")
        return _all(layout, seed)
    case = _case(fault)
    layout = layout or case.layout or demo.LAYOUT
    placed = demo.place(case, _layout(layout), seed)
    if why := demo.refused(placed):
        raise click.UsageError(f'--layout "{layout}" cannot work: {"; ".join(why)}')
    outcome = _one(placed, run_dir)
    if outcome is None:
        raise click.ClickException("there is no run directory, so there is no verdict to check")
    _say(placed, *outcome)
    return 0 if outcome[0].right else 1
