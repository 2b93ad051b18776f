"""The `diag` command: a click group that imports a subcommand only when it is asked for.

Why lazy: `diag --help` has to answer in 0.3 s, and torch, pyarrow or dash take longer than that.
"""

from __future__ import annotations

import difflib
import importlib
import sys

import click

COMMANDS = {
    "run": "run any training job under watch; print the verdict at the end",
    "demo": "the bundled trainer under watch, healthy or with one injected fault",
    "analyze": "diagnose loose artifacts: dumps, logs, topologies, whatever there is",
    "report": "the verdict of run directories, as text, JSON, markdown or HTML",
    "compare": "what changed between two runs, and whether it matters",
    "export": "a run as a trace for Perfetto, all ranks on one clock",
    "dashboard": "look at a finished or a live run in the browser",
    "topo": "a node's GPU and NIC topology, drawn and checked; with --plan before launch",
    "plan": "which parallel layouts fit a model and a cluster, and how fast they would be",
    "parity": "prove a parallel config of the trainer equal to one process",
    "bench": "measure ourselves",
    "explain": "what a cause is, what decides it, its cures and what not to do",
}


class LazyGroup(click.Group):
    """A group whose commands live in `diag.commands.NAME` as `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"diag.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if not name.startswith("-") and name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean `diag {near[0]}`?" if near else "see `diag --help`"
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="diag-training", prog_name="diag")
def group() -> None:
    """Say in one sentence what is wrong with a distributed training job, why, and what to do."""


def main() -> None:
    """Entry point; bad usage is exit 2 with one line that says what to type."""
    try:
        code = group.main(standalone_mode=False)
    except click.UsageError as wrong:
        path = wrong.ctx.command_path if wrong.ctx else "diag"
        click.echo(f"{path}: {wrong.format_message()}", err=True)
        sys.exit(2)
    except click.ClickException as wrong:
        click.echo(f"diag: {wrong.format_message()}", err=True)
        sys.exit(wrong.exit_code)
    except click.Abort:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)
