"""Two pictures of the HTML report, as inline SVG: phase shares of each rank, and the last steps.

In: metrics, or evidence and the verdict. Out: SVG text, "" when there is nothing to draw. Bounded:
at most `MOST_RANKS` rows and `MOST_RECTANGLES` marks, whatever the size of the run.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from collectors.annotate import PHASES
from playbooks.columns import codes
from playbooks.report.plain import plain
from playbooks.words import seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding

COLOURS = {
    "data": "#E69F00",
    "h2d": "#C7B42C",
    "forward": "#56B4E9",
    "backward": "#2378B5",
    "optimizer": "#009E73",
    "communication": "#D55E00",
    "checkpoint": "#CC79A7",
    "evaluation": "#8A6FC2",
    "compile": "#A1764B",
    "other": "#9AA3AD",
}
"""Okabe-Ito colours and their neighbours, as in the dashboard; readable on white and near-black."""
MOST_RANKS = 24
MOST_RECTANGLES = 3000
_WIDTH, _LEFT = 980, 84
_SHARE_WIDTH = 460
_ROW, _LANE, _STRIP = 32, 17, 5


def _order(name: str) -> int:
    return PHASES.index(name) if name in PHASES else len(PHASES)


def colour(phase: str) -> str:
    """Colour of a phase; an unknown one gets that of "other"."""
    return COLOURS.get(phase, COLOURS["other"])


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height}" '
        f'fill="{fill}"><title>{escape(plain(title))}</title></rect>'
    )


def _label(rank: int, y: float, culprits: Sequence[int]) -> str:
    kind = ' class="culprit"' if rank in culprits else ""
    return f'<text x="{_LEFT - 12}" y="{y:.1f}" text-anchor="end"{kind}>rank {rank}</text>'


def _open(width: int, height: int, title: str) -> str:
    kind = ' class="wide"' if width == _WIDTH else ""
    return (
        f'<svg{kind} viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def chosen(ranks: Sequence[int], culprits: Sequence[int]) -> list[int]:
    """At most MOST_RANKS of `ranks` in order, the culprits among them."""
    wanted = [r for r in ranks if r in culprits][:MOST_RANKS]
    rest = [r for r in ranks if r not in wanted]
    return sorted(wanted + rest[: MOST_RANKS - len(wanted)])


def legend(names: Sequence[str]) -> str:
    """Names of phases with their colours, as an HTML list."""
    items = "".join(
        f'<li><i style="background:{colour(n)}"></i>{escape(plain(n))}</li>'
        for n in sorted(set(names), key=_order)
    )
    return f'<ul class="legend">{items}</ul>'


def shares(of: Mapping[str, Mapping[str, float]], culprits: Sequence[int]) -> str:
    """One stacked bar a rank; `of` maps ranks (as text) to phase -> share of the step."""
    if not of:
        return ""
    ranks = chosen([int(r) for r in of], culprits)
    width = _SHARE_WIDTH - _LEFT - 8
    parts = [_open(_SHARE_WIDTH, len(ranks) * 24 + 22, "share of step time in each phase")]
    for row, rank in enumerate(ranks):
        y = row * 24 + 4
        parts.append(_label(rank, y + 13, culprits))
        x = float(_LEFT)
        for name, share in sorted(of[str(rank)].items(), key=lambda p: _order(p[0])):
            if share > 0.001:
                title = f"rank {rank}: {name} {share:.1%} of the step"
                parts.append(_rect(x, y, share * width, 16, colour(name), title))
                x += share * width
    bottom = len(ranks) * 24 + 16
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = _LEFT + share * width
        anchor = "end" if share == 1 else "middle"
        parts.append(f'<text x="{x:.0f}" y="{bottom}" text-anchor="{anchor}">{share:.0%}</text>')
    return "".join([*parts, "</svg>"])


class _Window:
    """The stretch of time that is drawn."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, max(end, start + 1)

    def x(self, time_ns: float) -> float:
        share = (time_ns - self.start) / (self.end - self.start)
        return _LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - 8)


def _window(evidence: Evidence, at_ns: int | None) -> _Window | None:
    """Some steps before the event and a few after it; without an event the last steps."""
    line = evidence.timeline
    if not line.ranks or not line.steps.size:
        return None
    known = line.seconds[~np.isnan(line.seconds)]
    step = max(int(np.median(known) * 1e9), 1000) if known.size else 1_000_000_000
    times = np.concatenate((line.start_ns.ravel(), line.end_ns.ravel()))
    times = times[times >= 0]
    if times.size == 0:
        return None
    first, last = int(times.min()), int(times.max())
    if at_ns is None or not first <= at_ns <= last + 3 * step:
        return _Window(max(first, last - 6 * step), last)
    return _Window(max(first, at_ns - 5 * step), at_ns + 3 * step)


def timeline(evidence: Evidence, verdict: Finding | None) -> tuple[str, list[str]]:
    """(picture, phases it shows): one lane a rank around the event, operations below it."""
    window = _window(evidence, None if verdict is None else verdict.at_ns)
    if window is None:
        return "", []
    culprits = () if verdict is None else verdict.ranks
    ranks = chosen(evidence.timeline.ranks, culprits)
    height = len(ranks) * _ROW + 30
    parts = [_open(_WIDTH, height, "what each rank did around the event")]
    for row, rank in enumerate(ranks):
        parts.append(
            f'<rect class="lane" x="{_LEFT}" y="{row * _ROW + 14}" width="{_WIDTH - _LEFT - 8}" '
            f'height="{_LANE}"/>'
        )
        parts.append(_label(rank, row * _ROW + 27, culprits))
    place = {rank: row * _ROW + 14 for row, rank in enumerate(ranks)}
    names = _phases(evidence, window, place, parts)
    _flights(evidence, window, place, parts)
    if verdict is not None and verdict.at_ns is not None:
        x = window.x(verdict.at_ns)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{height - 16}"/>')
    span = (window.end - window.start) / 1e9
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = window.x(window.start + share * (window.end - window.start))
        anchor = "end" if share == 1 else "middle"
        text = escape(seconds(share * span) if share else "0")
        parts.append(f'<text x="{x:.0f}" y="{height - 2}" text-anchor="{anchor}">{text}</text>')
    return "".join([*parts, "</svg>"]), names


def _inside(
    window: _Window,
    rank: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    ranks: Sequence[int],
) -> npt.NDArray[np.int64]:
    """Rows that the window shows, the longest when there are too many, in order of start."""
    until = np.where(end < 0, window.end, end)
    seen = np.isin(rank, ranks) & (start >= 0) & (start < window.end) & (until > window.start)
    rows = np.flatnonzero(seen)
    if rows.size > MOST_RECTANGLES:
        rows = rows[np.argsort(start[rows] - until[rows], kind="stable")[:MOST_RECTANGLES]]
    ordered: npt.NDArray[np.int64] = rows[np.lexsort((-until[rows], start[rows]))]
    return ordered


def _phases(
    evidence: Evidence, window: _Window, place: Mapping[int, int], parts: list[str]
) -> list[str]:
    data = evidence.collected
    phase, names = codes(data, "phases", "phase")
    rank, step = data.ints("phases", "rank"), data.ints("phases", "step")
    start, end = data.ints("phases", "start_ns"), data.ints("phases", "end_ns")
    shown: set[str] = set()
    for row in _inside(window, rank, start, end, list(place)):
        name = names[phase[row]] if phase[row] >= 0 else "other"
        shown.add(name)
        left = window.x(start[row])
        right = window.x(end[row] if end[row] >= 0 else window.end)
        how = "" if end[row] >= 0 else ", not left"
        lasted = f" {seconds((end[row] - start[row]) / 1e9)}" if end[row] >= 0 else ""
        title = f"rank {rank[row]}, step {step[row]}: {name}{lasted}{how}"
        parts.append(_rect(left, place[int(rank[row])], right - left, _LANE, colour(name), title))
    return sorted(shown, key=_order)


def _flights(
    evidence: Evidence, window: _Window, place: Mapping[int, int], parts: list[str]
) -> None:
    """Operations in flight as a thin strip below the phases; unfinished ones as an outline."""
    ledger = evidence.ledger
    for row in _inside(window, ledger.rank, ledger.issue, ledger.end, list(place)):
        call: dict[str, Any] = {"x": window.x(ledger.issue[row])}
        over = ledger.end[row] >= 0
        width = window.x(ledger.end[row] if over else window.end) - call["x"]
        y = place[int(ledger.rank[row])] + _LANE + 1
        op = ledger.ops[ledger.op[row]] if ledger.op[row] >= 0 else "operation"
        title = (
            f"rank {ledger.rank[row]}: {op} #{ledger.seq[row]}{'' if over else ', not complete'}"
        )
        parts.append(
            f'<rect class="{"flight" if over else "pending"}" x="{call["x"]:.1f}" y="{y}" '
            f'width="{max(width, 0.6):.1f}" height="{_STRIP}"><title>{escape(plain(title))}</title>'
            "</rect>"
        )
