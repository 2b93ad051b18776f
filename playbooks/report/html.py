"""The report as one HTML file that opens from disk: no script, no request, light and dark.

In: a Report and what it stands on. Out: HTML text. Everything foreign is cleaned of control
characters and escaped; styles and pictures are inline.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from playbooks.evidence import Evidence
from playbooks.report import svg
from playbooks.report.plain import coverage, numbers, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from collectors.collected import Collected
    from playbooks.finding import Finding
    from playbooks.report.model import Report

_CODE = re.compile(r"`([^`]+)`")


@cache
def _style() -> str:
    return resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")


def clean(text: object) -> str:
    return escape(plain(text))


def _prose(text: str) -> str:
    """Escaped text in which `backticks` are code."""
    return _CODE.sub(r"<code>\1</code>", clean(text))


def section(title: str, body: str) -> str:
    return f"<section><h2>{clean(title)}</h2>{body}</section>" if body else ""


def _items(texts: Iterable[str], tag: str = "ul") -> str:
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f"<{tag}>{items}</{tag}>" if items else ""


def render(report: Report, collected: Collected) -> str:
    """The whole page."""
    evidence = Evidence(collected)
    culprits = () if report.verdict is None else report.verdict.ranks
    picture, names = svg.timeline(evidence, report.verdict)
    body = [
        _header(collected),
        _answer(report),
        "" if report.verdict is None else _verdict(report.verdict),
        section("Also", _others(report)),
        section("Around the event" if culprits else "The last steps", _timeline(picture, names)),
        '<div class="grid">',
        section("Where each rank's step goes", _shares(report, culprits)),
        section("Numbers", _numbers(report)),
        "</div>",
        section("What this stands on", _coverage(report)),
    ]
    return page(_headline(report), body)


def page(title: str, body: Iterable[str]) -> str:
    """A whole document around sections that are HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>diag: {clean(title)}</title><style>{_style()}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _headline(report: Report) -> str:
    if report.verdict is not None:
        return report.verdict.summary
    if report.abstained is not None:
        return report.abstained.because
    return "" if report.health is None else report.health.summary


def _header(collected: Collected) -> str:
    run = collected.run
    left = f"<b>{clean(run.get('name') or 'diag report')}</b>"
    command = run.get("command")
    if isinstance(command, list):
        words = plain(" ".join(map(str, command)))
        words = words if len(words) <= 240 else words[:239] + "…"
        left += f' <span class="mono">{clean(words)}</span>'
    right = ""
    started = run.get("started_ns")
    if isinstance(started, int):
        moment = datetime.fromtimestamp(started / 1e9).astimezone()
        right = moment.strftime("%d %B %Y, %H:%M:%S")
    if run.get("host"):
        right += f" on {run['host']}"
    return f"<header><span>{left}</span><span>{clean(right)}</span></header>"


def card(tone: str, kicker: str, headline: str, more: str = "") -> str:
    return (
        f'<section class="card {tone}"><p class="kicker">{clean(kicker)}</p>'
        f"<h1>{clean(headline)}</h1>{more}</section>"
    )


def _answer(report: Report) -> str:
    verdict = report.verdict
    if verdict is not None:
        tags = [f"<code>{clean(verdict.cause)}</code>", clean(verdict.confidence)]
        tags += [f"where: {clean(verdict.where)}"] if verdict.where else []
        tags += [clean(verdict.group)] if verdict.group else []
        title = report.titles.get(verdict.cause)
        more = f'<p class="title">{clean(title)}</p>' if title else ""
        more += '<ul class="tags">' + "".join(f"<li>{tag}</li>" for tag in tags) + "</ul>"
        return card("bad", "Verdict", verdict.summary, more)
    if report.abstained is not None:
        more = '<p class="title">What would decide:</p>'
        more += _items(_prose(need) for need in report.abstained.need)
        return card("ask", "No verdict", report.abstained.because, more)
    return card("good", "Healthy", "" if report.health is None else report.health.summary)


def _verdict(verdict: Finding) -> str:
    rows = "".join(
        f'<tr><td>{clean(i.quote)}</td><td class="place mono">{clean(i.source)}'
        f"{'<br> ' + clean(i.locator) if i.locator else ''}</td></tr>"
        for i in verdict.evidence
    )
    why = f"<table>{rows}</table>" if rows else ""
    if verdict.formula:
        why += f'<p class="formula mono">{clean(verdict.formula)}</p>'
    excluded = _items(f"<code>{clean(c)}</code> {clean(b)}" for c, b in verdict.excluded)
    return (
        section("Why", why)
        + section("What to do", _items((_prose(a) for a in verdict.advice), "ol"))
        + section("Why not something else", excluded)
    )


def _others(report: Report) -> str:
    others = [f for f in report.findings if f is not report.verdict]
    return _items(
        f'{clean(f.summary)} <span class="role">{clean(f.role)}, {clean(f.confidence)}</span>'
        for f in others
    )


def _timeline(picture: str, names: list[str]) -> str:
    if not picture:
        return ""
    return (
        f'<div class="figure">{picture}</div>{svg.legend(names)}'
        '<p class="note">The thin strip below each lane shows operations in flight; an outline is '
        "one that never completed.</p>"
    )


def _shares(report: Report, culprits: tuple[int, ...]) -> str:
    of = report.metrics.get("phase_shares") or {}
    picture = svg.shares(of, culprits)
    if not picture:
        return ""
    names = [name for one in of.values() for name, share in one.items() if share > 0.001]
    left = len(of) - svg.MOST_RANKS
    note = f'<p class="note">{left} more ranks are not drawn.</p>' if left > 0 else ""
    return f'<div class="figure">{picture}</div>{svg.legend(names)}{note}'


def _numbers(report: Report) -> str:
    rows = "".join(
        f'<tr><td class="name">{clean(name)}</td><td>{clean(value)}</td></tr>'
        for name, value in numbers(report.metrics)
    )
    if not rows:
        return ""
    formulas = "".join(
        f'<tr><td class="name mono">{clean(name)}</td><td>{clean(formula)}</td></tr>'
        for name, formula in (report.metrics.get("formulas") or {}).items()
    )
    more = f"<details><summary>Formulas</summary><table>{formulas}</table></details>"
    return f"<table>{rows}</table>{more if formulas else ''}"


def _coverage(report: Report) -> str:
    seen = report.coverage
    told = coverage(seen.world_size, len(seen.ranks_seen), len(seen.missing_ranks))
    rows = "".join(
        f'<tr><td class="mono">{clean(s.path)}</td><td>{clean(s.kind)}</td><td>{clean(s.read)}</td>'
        f"<td>{clean('; '.join(s.problems))}</td></tr>"
        for s in seen.sources
    )
    if not rows:
        return f"<p>{clean(told)}.</p>"
    head = "<thead><tr><th>source</th><th>kind</th><th>read</th><th>problems</th></tr></thead>"
    troubled = sum(1 for s in seen.sources if s.problems or s.read != "all")
    state = "open" if troubled else ""
    summary = f"{len(seen.sources)} sources, {troubled} with problems"
    return (
        f"<p>{clean(told)}.</p><details {state}><summary>{clean(summary)}</summary>"
        f"<table>{head}{rows}</table></details>"
    )
