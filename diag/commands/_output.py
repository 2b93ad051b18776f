"""How a reading command hands over its answer: one set of options, one way out.

In: a Report and what it stands on. Out: text, JSON, markdown or HTML on stdout or in a file.
stdout carries the answer and nothing else; colour only when a person looks at a terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from collectors.collected import Collected
    from playbooks.report.model import Report

FORMATS = ("text", "json", "md", "html")

_F = TypeVar("_F", bound="Callable[..., Any]")


def options_of(*forms: str) -> Callable[[_F], _F]:
    """Adds `--format` (parameter `form`) and `-o FILE` (parameter `output`) to a command."""

    def add(command: _F) -> _F:
        command = click.option(
            "-o", "--output", type=click.Path(dir_okay=False), help="write to FILE, not to stdout"
        )(command)
        return click.option(
            "--format",
            "form",
            type=click.Choice(forms),
            default="text",
            show_default=True,
            help="form of the answer",
        )(command)

    return add


options = options_of(*FORMATS)
"""Those of a command that answers with a report."""


def fail_on(command: _F) -> _F:
    """Add `--fail-on root` (parameter `fail`): exit 1 when a root cause was found."""
    return click.option(
        "--fail-on", "fail", type=click.Choice(("root",)), help="exit 1 when a root was found"
    )(command)


def exit_code(report: Report, fail: str | None) -> int:
    """0 for an answer or an abstention; 1 when the caller asked to fail on a root cause."""
    return 1 if fail == "root" and any(f.role == "root" for f in report.findings) else 0


def wants_colour(output: str | None) -> bool:
    """Whether the answer goes to a terminal."""
    return output is None and sys.stdout.isatty()


def terminal_width() -> int:
    """Columns to fill: the terminal's, within what stays readable."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def write(answer: str, output: str | None) -> None:
    """Put `answer` on stdout or in the file; a file that cannot be written is one clear line."""
    answer = answer if answer.endswith("\n") else answer + "\n"
    if output is None:
        click.echo(answer, nl=False)
        return
    try:
        Path(output).write_text(answer, encoding="utf-8")
    except OSError as wrong:
        raise click.UsageError(f"cannot write {output}: {wrong.strerror}") from wrong


def as_text(body: Any) -> str:
    """`body` as JSON in ASCII: what a log line put into it never reaches a terminal raw."""
    return json.dumps(body, indent=2)


def emit(report: Report, collected: Collected, form: str, output: str | None) -> None:
    """Render `report` in `form` and write it."""
    if form == "json":
        answer = as_text(report.as_json())
    elif form == "md":
        from playbooks.report import markdown

        answer = markdown.render(report)
    elif form == "html":
        from playbooks.report import html

        answer = html.render(report, collected)
    else:
        from playbooks.report import text

        answer = text.render(report, colour=wants_colour(output), width=terminal_width())
    write(answer, output)
