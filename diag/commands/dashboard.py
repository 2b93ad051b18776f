"""`diag dashboard RUN…`: look at finished or live runs in the browser.

stdout: one line, the URL. Serves on 127.0.0.1 until Ctrl-C, then exit 0. A path that does not exist
is exit 2 with one line.
"""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click


@click.command("dashboard")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8050,
    show_default=True,
    help="port on 127.0.0.1; a free one is taken when it is in use (0: any free one)",
)
@click.option(
    "--open/--no-open", "browse", default=False, help="open the page in the browser of this machine"
)
def command(runs: tuple[Path, ...], port: int, browse: bool) -> None:
    """Look at run directories, finished or live, in the browser."""
    for path in runs:
        if not path.exists():
            raise click.UsageError(f"there is no run directory {str(path)!r}")
    from dashboards.app import serve

    def ready(url: str) -> None:
        click.echo(url)
        click.echo("diag: Ctrl-C ends the dashboard", err=True)
        if browse:
            webbrowser.open(url)

    serve(list(runs), port, ready)
