"""`diag run`: any job under watch, and a verdict at its end. Exit code: the job's own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from diag import supervise
from diag.watch import HangPolicy


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    short_help="run any training job under watch",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="where the run is kept; default runs/<HHMM>-<name>, an earlier run there is moved aside",
)
@click.option("--name", help="name of the run; default: from the command")
@click.option(
    "--hang-after",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="call the job stuck when no rank gets on for so long; default: adaptive, 30 s or 20 "
    "steps, and 300 s until the first step is done",
)
@click.option(
    "--on-hang",
    type=click.Choice(("report", "kill")),
    default="report",
    show_default=True,
    help="after the report on a hang: let the job go on, or end it",
)
@click.option("--dashboard", is_flag=True, help="serve the live dashboard while the job runs")
@click.option("--no-agent", is_flag=True, help="supervise only; nothing goes into the processes")
@click.argument("job", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def command(
    run_dir: Path | None,
    name: str | None,
    hang_after: float | None,
    on_hang: Literal["report", "kill"],
    dashboard: bool,
    no_agent: bool,
    job: tuple[str, ...],
) -> int:
    """Run CMD under watch; print the verdict at its end.

    The job's output, exit code and signals pass through unchanged; diag speaks on stderr only. The
    exit code is the job's own, 128 + signal when a signal ended it.
    """
    if name is not None and (not name.strip() or "/" in name):
        raise click.UsageError("--name is a file name without '/', such as --name trial-7")
    options = supervise.Options(
        run_dir=run_dir,
        name=name,
        agent=not no_agent,
        dashboard=dashboard,
        on_hang=on_hang,
        policy=HangPolicy(after=hang_after),
    )
    return supervise.run(job, options).exit_code
