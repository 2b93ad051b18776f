"""A comparison of two runs for people: text for a terminal, markdown, and a page of HTML.

In: a Comparison. Out: text. Foreign words (commands, host names, variables) pass `plain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.report import html
from playbooks.report.markdown import escape, table
from playbooks.report.plain import plain
from playbooks.report.text import Page
from playbooks.words import seconds, size

if TYPE_CHECKING:
    from playbooks.comparison import Comparison, Number

_MOST = 40
"""Differing facts that a page of text shows; JSON has all."""
_HEAD = ("", "A", "B", "B / A", "95 %", "")


def render_text(found: Comparison, colour: bool = False, width: int = 100) -> str:
    """For a terminal: the sentence in a box, numbers, then what else differs."""
    page = Page(colour, max(60, width))
    tone = "red" if found.regression else "green"
    page.box(plain(found.summary), "regression" if found.regression else "no regression", tone)
    page.gap()
    for label, side in (("A", found.a), ("B", found.b)):
        page.entry(label, plain(f"{side.name}: {side.answer}"))
    rows = [_HEAD, *(_row(n) for n in found.numbers)]
    wide = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    page.gap()
    for at, row in enumerate(rows if len(rows) > 1 else []):
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, wide, strict=True))
        ]
        page.line("numbers" if at == 0 else "", "  ".join(cells).rstrip())
    if found.losses:
        page.gap()
        page.entry("losses", found.losses)
    page.gap()
    for at, fact in enumerate(found.facts[:_MOST]):
        words = f"{fact.kind} {fact.name}: {_or_none(fact.a)} -> {_or_none(fact.b)}"
        page.entry("changed" if at == 0 else "", plain(words))
    if len(found.facts) > _MOST:
        page.entry("", f"and {len(found.facts) - _MOST} more (--format json has all)")
    return "\n".join(page.lines).rstrip() + "\n"


def render_markdown(found: Comparison) -> str:
    """For an issue or a chat."""
    lines = [f"# {escape(found.summary)}", ""]
    lines += [f"- {label}: {escape(f'{side.name}: {side.answer}')}"
              for label, side in (("A", found.a), ("B", found.b))]  # fmt: skip
    if found.numbers:
        lines += ["", "## Numbers", "", *table(_HEAD, [_row(n) for n in found.numbers])]
    if found.losses:
        lines += ["", f"Losses: {escape(found.losses)}"]
    if found.facts:
        facts = [(f.kind, f.name, _or_none(f.a), _or_none(f.b)) for f in found.facts]
        lines += ["", "## Changed", "", *table(("kind", "what", "A", "B"), facts)]
    return "\n".join(lines) + "\n"


def render_html(found: Comparison) -> str:
    """One file that opens from disk."""
    tone = "bad" if found.regression else "good"
    body = [
        html.card(tone, "Regression" if found.regression else "No regression", found.summary),
        html.section("The runs", _cells([(k, f"{s.name}: {s.answer}")
                                         for k, s in (("A", found.a), ("B", found.b))])),
        html.section("Numbers", _cells([_HEAD, *(_row(n) for n in found.numbers)])),
        html.section("Losses", f"<p>{html.clean(found.losses)}</p>" if found.losses else ""),
        html.section("Changed", _cells([(f"{f.kind} {f.name}", _or_none(f.a), _or_none(f.b))
                                        for f in found.facts])),
    ]  # fmt: skip
    return html.page(found.summary, body)


def _cells(rows: list[tuple[str, ...]]) -> str:
    """Rows as a table; nothing without rows."""
    lines = ["".join(f"<td>{html.clean(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>" if lines else ""


def _row(number: Number) -> tuple[str, ...]:
    between = "" if number.low is None else f"{number.low:.3f} to {number.high:.3f}"
    return (
        number.name,
        _value(number.a, number.unit),
        _value(number.b, number.unit),
        "" if number.ratio is None else f"{number.ratio:.3f}",
        between,
        number.verdict,
    )


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return seconds(value)
    return size(int(value)) if unit == "B" else f"{value:,.0f}"


def _or_none(text: str | None) -> str:
    return "(none)" if text is None else text
