"""How a command opens what it is pointed at: a run directory, or a pile of artifacts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pathlib import Path

    from collectors.collected import Collected


def run_directory(path: Path) -> Collected:
    """The tables of a run directory; one clear line (UsageError) where it is none."""
    from collectors import store

    if not path.is_dir():
        raise click.UsageError(
            f"{path} is not a folder; give a run directory, such as runs/1402-job"
        )
    try:
        return store.read_run(path)
    except FileNotFoundError as wrong:
        hint = f"for loose files type `diag analyze {path}`"
        raise click.UsageError(f"{path} is not a run directory; {hint}") from wrong
    except OSError as wrong:
        raise click.UsageError(f"cannot read {path}: {wrong.strerror or wrong}") from wrong


def anything(path: Path) -> Collected:
    """A run directory, or what the readers make of files; UsageError where nothing is readable."""
    from collectors import store
    from collectors.readers import read_paths

    if store.is_run(path):
        return run_directory(path)
    collected = read_paths([str(path)])
    if all(source.read == "none" for source in collected.sources):
        why = collected.sources[0].problems if collected.sources else ()
        raise click.UsageError(f"nothing readable in {path}" + (f": {why[0]}" if why else ""))
    return collected
