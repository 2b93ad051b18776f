"""The report as markdown, for an issue, a chat or a ticket.

In: a Report. Out: GitHub-flavoured markdown. Foreign text is escaped, so that a quote can be no
link, image, mention, table cell or HTML.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.report.plain import coverage, numbers, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.finding import Finding
    from playbooks.report.model import Report

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~@$])")


def escape(text: object) -> str:
    """Text that markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def code(text: object) -> str:
    """Inline code; backticks inside become apostrophes, pipes would end a table cell."""
    return "`" + plain(text).replace("`", "'").replace("|", "¦") + "`"


def prose(text: str) -> str:
    """Our own text, in which `backticks` are code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(code(p) if i % 2 else escape(p) for i, p in enumerate(parts))


def render(report: Report) -> str:
    """The whole report; ends with a newline."""
    lines: list[str] = []
    if report.verdict is not None:
        lines += _verdict(report, report.verdict)
    elif report.abstained is not None:
        lines += [f"# No verdict: {escape(report.abstained.because)}", ""]
        lines += ["What would decide:", ""]
        lines += [f"- {prose(need)}" for need in report.abstained.need]
    elif report.health is not None:
        lines += [f"# {escape(report.health.summary)}"]
    others = [f for f in report.findings if f is not report.verdict]
    if others:
        lines += ["", "## Also", "", *(f"- {escape(f.summary)} ({f.role})" for f in others)]
    rows = numbers(report.metrics)
    if rows:
        lines += ["", "## Numbers", "", *table(("metric", "value"), rows)]
    seen = report.coverage
    told = coverage(seen.world_size, len(seen.ranks_seen), len(seen.missing_ranks))
    lines += ["", "## Stands on", "", f"{told}.", ""]
    lines += table(
        ("source", "kind", "read", "problems"),
        [(s.path, s.kind, s.read, "; ".join(s.problems)) for s in seen.sources],
    )
    return "\n".join(lines).rstrip() + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    out = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    out += ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows]
    return out


def _verdict(report: Report, verdict: Finding) -> list[str]:
    parts = [code(verdict.cause), f"**{verdict.confidence}**"]
    if verdict.where:
        parts.append(f"where: {escape(verdict.where)}")
    if verdict.group:
        parts.append(escape(verdict.group))
    lines = [f"# {escape(verdict.summary)}", "", " · ".join(parts), ""]
    title = report.titles.get(verdict.cause)
    if title:
        lines += [f"> {escape(title)}", ""]
    lines += ["## Why", ""]
    lines += table(
        ("what it says", "where it stands"),
        [
            (i.quote, f"{i.source}: {i.locator}" if i.locator else i.source)
            for i in verdict.evidence
        ],
    )
    if verdict.formula:
        lines += ["", escape(verdict.formula)]
    if verdict.excluded:
        lines += ["", "## Why not", ""]
        lines += [f"- {code(cause)}: {escape(because)}" for cause, because in verdict.excluded]
    if verdict.advice:
        lines += ["", "## What to do", ""]
        lines += [f"{n}. {prose(a)}" for n, a in enumerate(verdict.advice, 1)]
    return lines
