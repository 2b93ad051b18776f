"""A schedule in characters: a row a rank, a column a stretch of time.

In: the lists that the executor runs, and what actions cost. Out: lines of text.

    rank 0  F0 F1    I0 W0 I1 W1
    rank 1     F0 I0 F1 I1 W0 W1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.parallel.timeline import timeline, work_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.parallel.actions import Action
    from trainer.parallel.timeline import Costs

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw(schedules: Sequence[Sequence[Action]], given: Costs | None = None) -> list[str]:
    """A line a rank; the shortest action is one label wide, longer ones are as much wider.

    Where a rank has several stages a letter tells them apart: F0a, F0b.
    """
    ranks = len(schedules)
    spans = timeline(work_of(schedules), given)
    several = any(span.action.stage >= ranks for span in spans)
    labels = [
        str(span.action) + (_LETTERS[span.action.stage // ranks % 26] if several else "")
        for span in spans
    ]
    wide = max(map(len, labels)) + 1
    unit = min(span.end - span.begin for span in spans)
    rows = [""] * ranks
    for span, label in sorted(zip(spans, labels, strict=True), key=lambda one: one[0].begin):
        at = round(span.begin / unit * wide)
        rows[span.rank] = f"{rows[span.rank]:<{at}}{label}"
    name = len(str(ranks - 1))
    return [f"rank {rank:<{name}}  {row}" for rank, row in enumerate(rows)]
