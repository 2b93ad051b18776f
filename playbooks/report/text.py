"""The report for a terminal: the verdict in a box, then why, why not, what to do, and the numbers.

In: a Report. Out: text of at most `width` columns (a path that is longer stays whole). Colour only
when asked. Every foreign string passes `plain`.

    +--------------------------------------------------------------------+
    | Rank 5 is stuck reading its data; the other 7 ranks wait for it.   |
    | hang.rank-stalled · where: data · tp[4..7] · certain               |
    +--------------------------------------------------------------------+
      why    ...
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from playbooks.report.plain import coverage, numbers, plain

if TYPE_CHECKING:
    from playbooks.finding import Finding
    from playbooks.report.model import Report

_COLOURS = {"red": "31", "yellow": "33", "green": "32", "dim": "2", "bold": "1"}
_MARGIN = 10
"""Columns of the left margin with its label."""


class Page:
    """Lines of a report under a label each, wrapped to a width."""

    def __init__(self, colour: bool, width: int) -> None:
        self.colour = colour
        self.width = width
        self.lines: list[str] = []

    def paint(self, text: str, *styles: str) -> str:
        if not self.colour or not text:
            return text
        codes = ";".join(_COLOURS[s] for s in styles)
        return f"\x1b[{codes}m{text}\x1b[0m"

    def box(self, headline: str, below: str, tone: str) -> None:
        inner = self.width - 4
        self.lines.append(self.paint("╭" + "─" * (self.width - 2) + "╮", tone))
        for text, styles in ((headline, ("bold",)), (below, ("dim",))):
            for line in textwrap.wrap(text, inner, break_long_words=True):
                side = self.paint("│", tone)
                self.lines.append(f"{side} {self.paint(line.ljust(inner), *styles)} {side}")
        self.lines.append(self.paint("╰" + "─" * (self.width - 2) + "╯", tone))

    def entry(self, label: str, text: str, place: str = "") -> None:
        """One entry; `place` stands at its end, on its own line when there is no room."""
        body = self.width - _MARGIN
        lines = textwrap.wrap(text, body, break_long_words=False, break_on_hyphens=False) or [""]
        if place:
            if len(lines[-1]) + 3 + len(place) <= body:
                gap = body - len(lines[-1]) - len(place)
                lines[-1] += " " * gap + self.paint(place, "dim")
            else:
                lines.append(" " * max(0, body - len(place)) + self.paint(place, "dim"))
        for number, line in enumerate(lines):
            head = f"  {label:<{_MARGIN - 3}} " if number == 0 else " " * _MARGIN
            self.lines.append(
                f"{self.paint(head, 'bold') if label and number == 0 else head}{line}"
            )

    def line(self, label: str, text: str) -> None:
        """One line as it is, such as a row of a table."""
        head = f"  {label:<{_MARGIN - 3}} "
        self.lines.append(f"{self.paint(head, 'bold') if label else head}{text}")

    def gap(self) -> None:
        if self.lines and self.lines[-1]:
            self.lines.append("")


def render(report: Report, colour: bool = False, width: int = 100) -> str:
    """The whole report; ends with a newline."""
    page = Page(colour, max(60, width))
    if report.verdict is not None:
        _verdict(page, report.verdict)
    elif report.abstained is not None:
        page.box("No verdict: " + plain(report.abstained.because), "abstained", "yellow")
        page.gap()
        for number, need in enumerate(report.abstained.need):
            page.entry("need" if number == 0 else "", plain(need))
    elif report.health is not None:
        page.box(plain(report.health.summary), "healthy", "green")
    _others(page, report)
    _numbers(page, report)
    return "\n".join(page.lines).rstrip() + "\n"


def _verdict(page: Page, verdict: Finding) -> None:
    parts = [verdict.cause]
    if verdict.where:
        parts.append(f"where: {verdict.where}")
    if verdict.group:
        parts.append(verdict.group)
    parts.append(verdict.confidence)
    page.box(plain(verdict.summary), plain(" · ".join(parts)), "red")
    page.gap()
    for number, item in enumerate(verdict.evidence):
        place = plain(f"{item.source}: {item.locator}" if item.locator else item.source)
        page.entry("why" if number == 0 else "", plain(item.quote), place)
    if verdict.formula:
        page.entry("", plain(verdict.formula))
    for number, (cause, because) in enumerate(verdict.excluded):
        page.entry("not" if number == 0 else "", plain(f"{cause}: {because}"))
    for number, advice in enumerate(verdict.advice, 1):
        page.entry("do" if number == 1 else "", plain(f"{number}. {advice}"))


def _others(page: Page, report: Report) -> None:
    """Effects and context in one line each."""
    others = [f for f in report.findings if f is not report.verdict]
    if others:
        page.gap()
    for number, finding in enumerate(others):
        tail = {"effect": "effect", "context": "context", "root": "possible root"}[finding.role]
        page.entry("also" if number == 0 else "", plain(finding.summary), f"({tail})")


def _numbers(page: Page, report: Report) -> None:
    """Measured numbers and what the answer stands on."""
    rows = numbers(report.metrics)
    if rows:
        page.gap()
    for number, (name, value) in enumerate(rows):
        page.entry("numbers" if number == 0 else "", f"{name:<15} {value}")
    page.gap()
    seen = report.coverage
    page.entry(
        "stands on", coverage(seen.world_size, len(seen.ranks_seen), len(seen.missing_ranks))
    )
    troubled = [s for s in seen.sources if s.problems or s.read != "all"]
    for source in troubled[:5]:
        why = "; ".join(source.problems) or f"read: {source.read}"
        page.entry("", plain(f"{source.path}: {why}"))
    if len(troubled) > 5:
        page.entry("", f"and {len(troubled) - 5} more sources that were read in part or not at all")
