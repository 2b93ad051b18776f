"""`diag report RUN...`: the verdict of run directories, live or finished.

In: run directories. Out: the same report as `diag analyze`, in the form asked for. Exit codes: 0
answered or abstained, 1 with `--fail-on root` and a root cause, 2 when a path is no run directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from diag.commands import _output

if TYPE_CHECKING:
    from collectors.collected import Collected


@click.command("report", short_help="the verdict of run directories")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@_output.options
@_output.fail_on
def command(runs: tuple[Path, ...], form: str, output: str | None, fail: str | None) -> int:
    """Diagnose run directories that `diag run` wrote; a live one as it stands now."""
    if len(runs) > 1 and (output is not None or form in ("json", "html")):
        raise click.UsageError(
            "several runs are shown one after another, as text or md on stdout; "
            "for json, html or -o give one run"
        )
    return max([_one(run, form, output, fail) for run in runs])


def _read(run: Path) -> Collected:
    from collectors import store

    if not run.is_dir():
        raise click.UsageError(f"{run} is not a folder; give a run directory such as runs/1402-job")
    try:
        return store.read_run(run)
    except FileNotFoundError as wrong:
        hint = f"for loose files type `diag analyze {run}`"
        raise click.UsageError(f"{run} is not a run directory; {hint}") from wrong
    except OSError as wrong:
        raise click.UsageError(f"cannot read {run}: {wrong.strerror or wrong}") from wrong


def _one(run: Path, form: str, output: str | None, fail: str | None) -> int:
    from playbooks import engine

    collected = _read(run)
    report = engine.diagnose(collected)
    _output.emit(report, collected, form, output)
    return _output.exit_code(report, fail)
