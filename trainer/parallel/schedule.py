"""A pipeline schedule is data: for each rank the list of what it does, in order.

In: numbers of ranks, microbatches and stages a rank. Out: lists of Action, one a rank, which the
executor runs and from which `timeline.py` predicts and `drawing.py` draws. Stage s is rank s mod
p's. No torch here.

    1F1B, 3 stages, 4 microbatches           F2 = forward of microbatch 2, B0 = backward of 0
    stage 0   F0 F1 F2          B0 F3 B1    B2    B3
    stage 1      F0 F1    B0 F2 B1 F3 B2    B3
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.parallel.actions import Kind
from trainer.parallel.timeline import with_moves, work_of

if TYPE_CHECKING:
    from trainer.parallel.actions import Action, Work


def make(name: str, ranks: int, microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """For each rank the actions of the schedule `name`, moves included."""
    return with_moves(
        [_WORK[name](rank, ranks, microbatches, virtual) for rank in range(ranks)], ranks
    )


def forwards(schedules: list[list[Action]]) -> list[list[Action]]:
    """For each rank the same schedule without its backwards, as evaluation runs it."""
    work = [[one for one in own if one[0] is Kind.FORWARD] for own in work_of(schedules)]
    return with_moves(work, len(schedules))


def _naive(rank: int, _ranks: int, microbatches: int, _virtual: int) -> Work:
    """One microbatch at a time through all stages and back; idle (p - 1) / p of the time."""
    return [(kind, rank, i) for i in range(microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]


def _gpipe(rank: int, _ranks: int, microbatches: int, _virtual: int) -> Work:
    """All forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965).

    Idle (p - 1) / (m + p - 1) of the time, with all m microbatches in flight.
    """
    return [(kind, rank, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(microbatches)]


def _alternating(rank: int, ranks: int, microbatches: int, _virtual: int) -> Work:
    """1F1B (Narayanan et al. 2019, PipeDream-flush): fill, then alternate, then drain.

    Stage s keeps at most min(p - s, m) activations; idle (p - 1) / (m + p - 1) of the time.
    """
    forwards = [(Kind.FORWARD, rank, i) for i in range(microbatches)]
    backwards = [(Kind.BACKWARD, rank, i) for i in range(microbatches)]
    return _alternate(forwards, backwards, warmup=ranks - rank - 1)


def _interleaved(rank: int, ranks: int, microbatches: int, virtual: int) -> Work:
    """1F1B over v stages a rank (Narayanan et al. 2021, arXiv:2104.04473).

    Microbatches go in groups of p through a rank's stages in turn, which shortens the fill: idle
    (p - 1) / (v m + p - 1) of the time. Needs m to be a multiple of p.
    """
    total = microbatches * virtual
    turns = [(k // ranks % virtual, k // (ranks * virtual) * ranks + k % ranks)
             for k in range(total)]  # fmt: skip
    forwards = [(Kind.FORWARD, turn * ranks + rank, i) for turn, i in turns]
    backwards = [(Kind.BACKWARD, (virtual - 1 - turn) * ranks + rank, i) for turn, i in turns]
    return _alternate(forwards, backwards, warmup=2 * (ranks - rank - 1) + (virtual - 1) * ranks)


def _zero_bubble(rank: int, ranks: int, microbatches: int, _virtual: int) -> Work:
    """1F1B whose backwards come in halves, as ZB-H1's do (Qi et al. 2024, arXiv:2401.10241).

    Weight gradients stay behind by as many microbatches as the rank has ranks before it, and fill
    the drain, where these are still busy. Every rank then holds min(p, m) microbatches, as many as
    the first one of 1F1B. With F = I = W, idle (p - 1) / (3 m + p - 1) of the time where m >= p.
    """
    halves = _alternate(
        [(Kind.FORWARD, rank, i) for i in range(microbatches)],
        [(Kind.INPUT_GRADIENT, rank, i) for i in range(microbatches)],
        warmup=ranks - rank - 1,
    )
    work: Work = []
    for kind, stage, i in halves:
        work.append((kind, stage, i))
        if kind is Kind.INPUT_GRADIENT and i >= rank:
            work.append((Kind.WEIGHT_GRADIENT, stage, i - rank))
    late = range(max(0, microbatches - rank), microbatches)
    return work + [(Kind.WEIGHT_GRADIENT, rank, i) for i in late]


def _alternate(forwards: Work, backwards: Work, warmup: int) -> Work:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left."""
    warmup = min(warmup, len(forwards))
    work = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        work += [forward, backward]
    return work + backwards[len(forwards) - warmup :]


_WORK = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _alternating,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}
