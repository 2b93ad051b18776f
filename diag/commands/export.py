"""`diag export RUN -o FILE`: all ranks on one clock, as a trace for Perfetto or chrome://tracing.

In: a run directory, or loose artifacts. Out: FILE, JSON of the Trace Event Format, gzip where its
name ends in .gz; it appears whole or not at all. Exit codes: 0, 2 when nothing has a time.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diag.commands import _runs

if TYPE_CHECKING:
    from collections.abc import Iterable


@click.command("export", short_help="a trace of all ranks for Perfetto")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="write to FILE (.json, or .json.gz for gzip)",
)
def command(run: Path, output: Path) -> int:
    """Write one run as a trace to open at https://ui.perfetto.dev (it stays on your machine)."""
    from playbooks.evidence import Evidence
    from playbooks.report import trace

    evidence = Evidence(_runs.anything(run))
    origin = trace.origin_ns(evidence)
    if origin is None:
        raise click.UsageError(f"nothing in {run} has a time, so there is no timeline to export")
    head = {"displayTimeUnit": "ms", "otherData": {"origin_ns": origin, "run": str(run)}}
    try:
        count = _write(output, head, trace.events(evidence))
    except OSError as wrong:
        raise click.UsageError(f"cannot write {output}: {wrong.strerror or wrong}") from wrong
    click.echo(f"{output}: {count:,} events, {output.stat().st_size / 1e6:.1f} MB", err=True)
    return 0


def _write(path: Path, head: dict[str, Any], events: Iterable[dict[str, Any]]) -> int:
    """Stream the trace into `path`; returns the number of events."""
    partial = path.with_name(path.name + ".part")
    opened = gzip.open if path.suffix == ".gz" else open
    count = 0
    try:
        with opened(partial, "wt", encoding="ascii") as file:
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [')
            for event in events:
                file.write((",\n" if count else "\n") + json.dumps(event))
                count += 1
            file.write("\n]}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count
