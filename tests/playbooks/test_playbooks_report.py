"""The forms of the report: the facts are in each, and foreign text can do no harm."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from playbooks_jobs import GLOO_CLOSED, Job, ddp, mesh

from collectors.collected import Collected, empty
from playbooks.engine import diagnose
from playbooks.report import html, markdown, svg, text
from playbooks.report.model import SCHEMA, Report
from playbooks.report.plain import plain

EVIL = "\x1b[31m</td><script>alert(1)</script>\x07\u202e[x](javascript:y) `|` \x9b2J"


def dead() -> Job:
    job = ddp(steps=12)
    job.died(3, 1500, signal=9)
    job.raised(0, 1490, GLOO_CLOSED)
    job.failed()
    return job


def hostile() -> Job:
    job = ddp(steps=5)
    job.raised(1, 480, f"ValueError: {EVIL}", f'  File "/x/{EVIL}.py", line 3, in {EVIL}')
    job.failed()
    job.run["name"] = EVIL
    job.run["command"] = ["python", EVIL]
    return job


def judged(job: Job) -> tuple[Report, Collected]:
    collected = job.collected()
    return diagnose(collected), collected


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not close."""

    VOID = {"meta", "rect", "line", "br", "i"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.said: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] in self.VOID and self.open[-1] != tag:
            self.open.pop()
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_text_says_verdict_reason_remedy_and_effects() -> None:
    report, _ = judged(dead())
    page = text.render(report)
    box = page.split("╰")[0]
    assert "Rank 3 was killed by SIGKILL" in box
    assert "hang.rank-died · certain" in box
    for label in ("why", "not", "do", "also", "numbers", "stands on"):
        assert re.search(rf"^  {label} ", page, re.MULTILINE), label
    assert "exits.jsonl: rank 3" in page
    assert "1. Read that rank's own stderr" in page
    assert "connection closed by peer" in page
    assert "4 of 4 ranks seen" in page


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_text_keeps_its_width(width: int) -> None:
    """A path is never broken, so a line may be as long as one."""
    report, _ = judged(dead())
    for line in text.render(report, width=width).splitlines():
        longest = max(map(len, line.split()), default=0)
        assert len(line) <= max(width, longest + 10), line


def test_colour_only_when_asked_and_never_from_quotes() -> None:
    report, _ = judged(hostile())
    assert "\x1b" not in text.render(report)
    coloured = text.render(report, colour=True)
    assert "\x1b[31m╭" in coloured
    assert "\x1b[31m<" not in coloured
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert bare == text.render(report)


def test_plain_drops_what_a_terminal_would_obey() -> None:
    assert plain("a\x1b[2Jb\x1b]0;t\x07c\x9bd\u202ee\nf\tg") == "abcde f g"


def test_health_and_abstention_have_their_own_box() -> None:
    report, _ = judged(ddp())
    assert "ended well" in text.render(report)
    nothing = text.render(diagnose(empty()))
    assert "No verdict" in nothing
    assert re.search(r"^  need ", nothing, re.MULTILINE)


def test_markdown_holds_the_facts_and_no_live_markup() -> None:
    page = markdown.render(judged(dead())[0])
    assert page.startswith("# Rank 3 was killed by SIGKILL")
    assert "`hang.rank-died`" in page
    assert "## What to do" in page
    assert "`torchrun --log-dir DIR --redirects 3 --tee 3`" in page
    evil = markdown.render(judged(hostile())[0])
    assert "<script" not in evil.replace("\\<", "")
    assert "](javascript" not in evil.replace("\\]", "").replace("\\(", "(")
    for line in evil.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 5), line


def test_html_is_one_file_that_asks_for_nothing() -> None:
    report, collected = judged(dead())
    page = html.render(report, collected)
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert "link" not in parsed.tags
    assert not [v for k, v in parsed.attributes if k in ("src", "href")]
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page
    said = " ".join(parsed.said)
    for fact in ("Rank 3 was killed by SIGKILL", "hang.rank-died", "exits.jsonl", "What to do"):
        assert fact in said
    assert page.count("<svg") == 2


def test_html_escapes_everything_foreign() -> None:
    report, collected = judged(hostile())
    page = html.render(report, collected)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "script" not in Page(page).tags


def test_html_of_nothing_and_of_health_is_whole() -> None:
    for collected in (empty(), mesh().collected()):
        parsed = Page(html.render(diagnose(collected), collected))
        assert parsed.tags.count("h1") == 1


def test_pictures_are_bounded_and_show_the_culprits() -> None:
    ranks = list(range(300))
    assert len(svg.chosen(ranks, [299, 17])) == svg.MOST_RANKS
    assert {17, 299} <= set(svg.chosen(ranks, [299, 17]))
    of = {str(r): {"forward": 0.6, "other": 0.4} for r in ranks}
    picture = svg.shares(of, [299])
    assert picture.count("<rect") == 2 * svg.MOST_RANKS
    assert 'class="culprit">rank 299<' in picture


def test_json_has_the_contracts_keys() -> None:
    shown = judged(dead())[0].as_json()
    assert shown["schema"] == SCHEMA
    assert set(shown) == {
        "schema", "verdict", "findings", "abstained", "health", "metrics", "coverage",
    }  # fmt: skip
    needed = {"cause", "title", "confidence", "ranks", "group", "axis", "summary", "evidence"}
    assert needed | {"advice", "formula"} <= set(shown["verdict"])
    assert {"step_time_s", "tokens_per_s", "mfu", "bubble", "exposed_comm"} <= set(shown["metrics"])
    assert set(shown["coverage"]) == {"world_size", "ranks_seen", "missing_ranks", "sources"}
