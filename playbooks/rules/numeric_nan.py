"""The first non-finite value: numeric.nan, with its rank, step and module where they are on record.

In: progress lines, lines about non-finite values, values that each rank printed of its own. Out: at
most one finding. Before a reduction only the origin has the value; once all ranks have it, the rank
is left open.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from playbooks import knowledge
from playbooks.measures.values import number
from playbooks.rules.naming import root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.measures.by_rank import Spread

_WINDOW = 3
_EMPTY = re.compile(r"(?i)label|token|target|valid|mask|sample")
_STAGES = ("loss", "gradient", "activation", "weight")


def bad(event: Event) -> bool:
    """Whether a progress line has a loss or norm that is not finite."""
    values = [event.number("loss"), event.number("grad_norm")]
    return any(v is not None and not math.isfinite(v) for v in values)


def first(evidence: Evidence, points: Sequence[Event]) -> list[Finding]:
    """The finding, from words where they name it, else from values by rank, else from the curve."""
    said = evidence.lines.of("numeric.nonfinite")
    own = [e for e in said if not e.fields.get("inherited")]
    first_bad = next((e for e in points if bad(e)), None)
    lasting = bool(points) and bad(points[-1])
    raised = [r for r in evidence.raised if r.kind.name == "numeric"]
    spread = _earliest(evidence)
    if evidence.lines.of("kernel.xid") or not (own or lasting or raised or spread):
        return []
    early = first_bad is None or list(points).index(first_bad) < _WINDOW
    if early and not own and not raised and not spread:
        return []
    if evidence.lines.of("train.overflow") and not lasting and not raised:
        return []
    steps = [s for e in own if (s := e.number("step")) is not None]
    begin = [e for e in own if not steps or e.number("step") == min(steps)]
    told = {int(r) for e in begin if (r := e.fields.get("rank", e.rank)) is not None}
    ranks = tuple(told) if len(told) == 1 else spread_ranks(spread) or _odd(evidence, first_bad)
    module = next((e.text("module") for e in begin if e.text("module")), "")
    step = _step(steps, spread, first_bad)
    empty = _empty(evidence, spread)
    at = f" in step {step}" if step is not None else ""
    who = f" on {ranks_words(ranks)}" if ranks else ""
    what = f" in {module}" if module else ""
    why = f", whose {empty} is 0 there" if empty else ""
    advice = [f"Look at {module}{who}{at} with the batch of that step first."] if module else []
    where = "module" if module else "data" if empty else "unknown"
    items = [spread.items[r] for r in ranks if spread is not None and r in spread.items]
    return [
        root(
            "numeric.nan",
            "likely",
            f"The first non-finite value appears{what}{who}{at}{why}, after finite ones.",
            [*begin[:2], *([first_bad] if first_bad else [])],
            more=[*items[:2], *(r.item for r in raised[:1])],
            ranks=ranks,
            where=where,
            advice=(*advice, *knowledge.cause("numeric.nan").advice) if advice else (),
            excluded=(
                ("numeric.divergence", "loss and norm were in trend just before"),
                ("crash.user-exception", "a non-finite value is what the error is about"),
                ("numeric.loss-scale-collapse", "no loss scale fell to its floor"),
                ("numeric.replicas-diverged", "the values are not finite, not merely different"),
            ),
        )
    ]


def _step(steps: list[float], spread: Spread | None, first_bad: Event | None) -> int | None:
    if steps:
        return int(min(steps))
    if spread is not None and spread.step is not None:
        return spread.step
    return int(first_bad.number("step") or 0) if first_bad else None


def _unfinite(values: Sequence[str]) -> bool:
    return any((n := number(v)) is not None and not math.isfinite(n) for v in values)


def _earliest(evidence: Evidence) -> Spread | None:
    """The first values by rank of which some are not finite, after two of the kind that are."""
    spreads = [s for s in evidence.measures.spreads if s.quantity in _STAGES and not s.axis]
    known = [s for s in spreads if s.step is not None]
    ordered = sorted(known or spreads, key=lambda s: (s.step or 0, s.row.line))
    for place, spread in enumerate(ordered):
        if any(_unfinite(v) for v in spread.values.values()):
            before = [s for s in ordered[:place] if s.label == spread.label]
            return spread if len(before) >= 2 else None
    return None


def spread_ranks(spread: Spread | None) -> tuple[int, ...]:
    """The ranks whose value is not finite, when they are fewer than the others."""
    if spread is None:
        return ()
    wrong = [r for r, v in spread.values.items() if _unfinite(v)]
    return tuple(sorted(wrong)) if 2 * len(wrong) < len(spread.values) else ()


def _empty(evidence: Evidence, spread: Spread | None) -> str:
    """What the line of the first bad value counts as 0: labels, tokens, targets."""
    ranks = spread_ranks(spread)
    if spread is None or not ranks:
        return ""
    for row in evidence.measures.rows:
        if row.rank in ranks and row.at("step") == spread.step:
            for value in row.values:
                if value.number == 0 and _EMPTY.search(value.label):
                    return value.label
    return ""


def _odd(evidence: Evidence, at: Event | None) -> tuple[int, ...]:
    """Ranks whose own loss is non-finite at that step while others' are finite."""
    if at is None:
        return ()
    same = [e for e in evidence.lines.of("train.step") if e.number("step") == at.number("step")]
    losses = {e.rank: e.number("loss") for e in same if e.rank is not None}
    known = {r: v for r, v in losses.items() if v is not None}
    wrong = [r for r, v in known.items() if not math.isfinite(v)]
    return tuple(sorted(wrong)) if wrong and 2 * len(wrong) < len(known) else ()
