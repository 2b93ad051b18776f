"""From a run directory to its report: the files in it, and the text for the terminal.

In: a run directory, live or finished. Out: report.json, report.md, report.html in it, and the boxed
verdict as text. Loads pyarrow, so it is imported only when there is something to say.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from collectors import store
from diag import voice
from playbooks import engine
from playbooks.report import html, markdown, text

if TYPE_CHECKING:
    from pathlib import Path

    from playbooks.report.model import Report


def judge(run_dir: Path) -> tuple[Report, bool]:
    """Diagnose the run as it stands and write its three reports; (report, whether they stand).

    A report that cannot be written (disk full, folder gone) is one line; the verdict stands.
    """
    collected = store.read_run(run_dir)
    report = engine.diagnose(collected)
    try:
        for name, content in (
            ("report.json", json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n"),
            ("report.md", markdown.render(report)),
            ("report.html", html.render(report, collected)),
        ):
            partial = run_dir / (name + ".part")
            partial.write_text(content, encoding="utf-8")
            partial.replace(run_dir / name)
    except OSError as wrong:
        voice.trouble("the report could not be written", wrong)
        return report, False
    return report, True


def finish(run_dir: Path) -> tuple[Report, bool]:
    """Compact the tables of a finished run, then judge it."""
    try:
        store.compact(run_dir)
    except OSError as wrong:
        voice.trouble("the tables could not be compacted", wrong)
    return judge(run_dir)


def as_text(report: Report, written: bool, run_dir: Path, *, colour: bool) -> str:
    """The box, and where the rest is, if there is a rest."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    box = text.render(report, colour=colour, width=width).rstrip("\n")
    if not written:
        return box + "\n"
    return f"{box}\n\n  report     {run_dir}/report.html\n  dashboard  diag dashboard {run_dir}\n"
