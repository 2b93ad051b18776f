"""From the simplest layout to a chosen one, one change a rung, in the order practitioners think.

In: a Job and the layout at the top. Out: rungs, each judged: fit first, and ZeRO before
recomputation before ep, tp, pp and cp. What a change buys shows before the next is made. No torch.

    dp=64 ─► zero=1 ─► zero=3 ─► recompute ─► tp+sp ─► pp ─► interleaved ─► cp
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.planner import memory, timing
from trainer.planner.candidate import Candidate
from trainer.planner.legal import reasons
from trainer.planner.search import room

if TYPE_CHECKING:
    from trainer.planner.candidate import Job

_ORDER = (
    ("zero",),
    ("checkpointing",),
    ("ep",),
    ("tp", "sp"),
    ("pp",),
    ("schedule", "virtual"),
    ("cp", "cp_form"),
)
"""What changes together, in which order."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder."""

    change: str
    candidate: Candidate
    reasons: tuple[str, ...]
    """Why it is no legal layout; memory and time are then unknown."""
    peak: float | None
    fits: bool
    timing: timing.Timing | None


def ladder(job: Job, top: Candidate) -> list[Rung]:
    """Rungs from plain data parallelism to `top`."""
    world = job.cluster.count
    now = Candidate(dp=world, microbatch=top.microbatch)
    rungs = [_rung(job, now, "plain data parallelism")]
    for names in _ORDER:
        if names == ("zero",):
            steps = [zero for zero in (1, 2, 3) if zero <= top.zero]
            for zero in steps:
                now = replace(now, zero=zero)
                rungs.append(_rung(job, now, f"zero={zero}"))
            continue
        changed = {name: getattr(top, name) for name in names}
        if all(getattr(now, name) == value for name, value in changed.items()):
            continue
        now = replace(now, **changed)
        now = replace(now, dp=max(1, world // (now.tp * now.pp * now.cp)))
        told = [f"{n}={str(v).lower()}" for n, v in changed.items() if n != "cp_form"]
        rungs.append(_rung(job, now, " ".join(told)))
    return rungs


def _rung(job: Job, one: Candidate, change: str) -> Rung:
    wrong = tuple(reasons(job, one))
    if wrong:
        return Rung(change, one, wrong, None, fits=False, timing=None)
    size, _ = memory.peak(job, one)
    return Rung(change, one, (), size, size <= room(job), timing.of_step(job, one))
