"""`diag report RUN...`: the verdict of run directories, live or finished.

In: run directories. Out: the same report as `diag analyze`, in the form asked for. Exit codes: 0
answered or abstained, 1 with `--fail-on root` and a root cause, 2 when a path is no run directory.
"""

from __future__ import annotations

from pathlib import Path

import click

from diag.commands import _output, _runs


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


def _one(run: Path, form: str, output: str | None, fail: str | None) -> int:
    from playbooks import engine

    collected = _runs.run_directory(run)
    report = engine.diagnose(collected)
    _output.emit(report, collected, form, output)
    return _output.exit_code(report, fail)
