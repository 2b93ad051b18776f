"""What a link to the dashboard means: page, run, ranks, steps. Pure text in, pure text out.

    /timeline?run=1402-train&ranks=0-3,8&steps=10-20
A run is a key that the server gave out; it is looked up, never opened as a path. What cannot be
understood is left out, as if it had not been said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, quote

from dashboards.figures.selection import Selection

_MOST_RANKS = 1 << 16
"""Bounds what a mistyped range can cost."""
_DIGITS = 9


@dataclass(frozen=True)
class Address:
    """A place in the dashboard."""

    page: str = "/"
    run: str | None = None
    chosen: Selection = field(default_factory=Selection)

    def search(self) -> str:
        """The part of the URL after the path, "" or from the question mark on."""
        parts = []
        if self.run is not None:
            parts.append(f"run={quote(self.run, safe='')}")
        if self.chosen.ranks is not None:
            parts.append(f"ranks={rank_text(self.chosen.ranks)}")
        first, last = self.chosen.first, self.chosen.last
        if first is not None and first == last:
            parts.append(f"step={first}")
        elif self.chosen.stepped:
            parts.append(f"steps={'' if first is None else first}-{'' if last is None else last}")
        return "?" + "&".join(parts) if parts else ""

    def to(self, page: str) -> str:
        """Link to another page with the same run and selection."""
        return page + replace(self, page=page).search()


def rank_text(ranks: tuple[int, ...]) -> str:
    """Ranks as ranges: "0-3,8"."""
    out: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if out and rank == out[-1][1] + 1:
            out[-1][1] = rank
        else:
            out.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """The ranks of "0-3,8"; None when there is none in it."""
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(
            rf"(\d{{1,{_DIGITS}}})(?:-(\d{{1,{_DIGITS}}}))?", part.strip(), re.ASCII
        )
        if found:
            first = int(found[1])
            last = int(found[2] or first)
            ranks.update(range(first, min(last, first + _MOST_RANKS) + 1))
        if len(ranks) > _MOST_RANKS:
            break
    return tuple(sorted(ranks)) or None


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(rf"\d{{1,{_DIGITS}}}", text, re.ASCII) else None


def parse(page: str | None, search: str | None) -> Address:
    """The address that a browser shows."""
    query = {k: v[-1] for k, v in parse_qs((search or "").lstrip("?")).items()}
    first = last = _number(query.get("step"))
    if "steps" in query:
        low, _, high = query["steps"].partition("-")
        first, last = _number(low), _number(high)
    ranks = parse_ranks(query.get("ranks", ""))
    return Address(page or "/", query.get("run"), Selection(ranks, first, last))
