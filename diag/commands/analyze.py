"""`diag analyze PATH...`: diagnose whatever files people have; "-" reads stdin.

In: files, folders, run directories; kinds are recognised by content. Out: one report. Exit 0 for an
answer or an abstention, 1 with `--fail-on root` and a root cause, 2 when nothing could be read (of
files that are there the report, an abstention with their coverage, is written all the same).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diag.commands import _output

if TYPE_CHECKING:
    from collectors.collected import Collected, Source

STDIN = 1 << 30
"""More than this does not come over a pipe; a file of any size does."""


def _standard_input(paths: tuple[str, ...]) -> bytes | None:
    if "-" not in paths:
        return None
    data = sys.stdin.buffer.read(STDIN + 1)
    if len(data) > STDIN:
        raise click.UsageError("more than 1 GiB on stdin; name the file instead")
    return data


def _why(source: Source) -> str:
    return f"{source.path}: {source.problems[0] if source.problems else 'not readable'}"


def _complain(collected: Collected, paths: tuple[str, ...]) -> bool:
    """Say what was not read; whether nothing was. UsageError when there is not even a file."""
    unread = [s for s in collected.sources if s.read == "none"]
    if len(unread) == len(collected.sources):
        if not unread:
            raise click.UsageError(f"nothing to read in {', '.join(paths)}")
        more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        line = f"nothing readable: {_why(unread[0])}{more}"
        if not any(path == "-" or Path(path).exists() for path in paths):
            raise click.UsageError(line)
        click.echo(f"diag analyze: {line}", err=True)
        return True
    named = set(paths)
    for source in unread:
        if source.path in named:
            click.echo(f"diag analyze: {_why(source)}", err=True)
    return False


@click.command("analyze")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@_output.options
@_output.fail_on
def command(paths: tuple[str, ...], form: str, output: str | None, fail: str | None) -> int:
    """Diagnose loose artifacts: files, folders, run directories, or - for stdin."""
    from collectors.readers import read_paths

    collected = read_paths(paths, _standard_input(paths))
    nothing = _complain(collected, paths)
    from playbooks.engine import diagnose

    report = diagnose(collected)
    _output.emit(report, collected, form, output)
    return 2 if nothing else _output.exit_code(report, fail)
