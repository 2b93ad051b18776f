"""What a pipeline schedule costs: idle time, and microbatches whose activations stages hold.

In: a schedule's name, ranks, microbatches, stages a rank. Out: the closed forms of what the lists
of `trainer/parallel/schedule.py` show (`tests/trainer/test_planner_bubble.py` compares them); where
there is no closed form, the lists themselves. No torch.
"""

from __future__ import annotations

from functools import cache

from trainer.parallel import schedule as schedules
from trainer.parallel import timeline


@cache
def bubble(schedule: str, ranks: int, microbatches: int, virtual: int = 1) -> float:
    """The share of time in which ranks idle, stages being equal and a backward two forwards.

    (p - 1) / (v m + p - 1) for GPipe, 1F1B (v = 1) and interleaved (arXiv:2104.04473).
    """
    p, m = ranks, microbatches
    if schedule == "naive":
        return (p - 1) / p
    if schedule == "zero-bubble":
        if m >= p:
            return (p - 1) / (3 * m + p - 1)
        return timeline.bubble(schedules.make(schedule, p, m))
    return (p - 1) / (virtual * m + p - 1)


@cache
def in_flight(schedule: str, ranks: int, microbatches: int, virtual: int = 1) -> tuple[int, ...]:
    """For each rank the most microbatches, of one of its stages each, that it holds at once."""
    p, m = ranks, microbatches
    total = m * virtual
    if schedule == "naive":
        return (1,) * p
    if schedule == "gpipe":
        return (m,) * p
    if schedule == "zero-bubble":
        return (min(p, m),) * p
    if schedule == "interleaved":
        return tuple(min(total, 2 * (p - r - 1) + (virtual - 1) * p + 1) for r in range(p))
    return tuple(min(p - r, m) for r in range(p))
