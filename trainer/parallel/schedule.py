"""A pipeline schedule is data: for each stage the list of what it does, in order.

In: numbers of ranks, microbatches and stages a rank. Out: lists of Action, one a rank, which the
executor runs and from which `bubble` and `in_flight` are predicted. Stage s is rank s mod p's.
No torch here.

    1F1B, 3 stages, 4 microbatches           F2 = forward of microbatch 2, B0 = backward of 0
    stage 0   F0 F1 F2          B0 F3 B1    B2    B3
    stage 1      F0 F1    B0 F2 B1 F3 B2    B3
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a stage can do with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    RECV_INPUT = "<F"
    """Take the stage's input from the stage before."""
    SEND_OUTPUT = "F>"
    """Give the stage's output to the stage after."""
    RECV_GRADIENT = "B<"
    """Take the gradient of the output from the stage after."""
    SEND_GRADIENT = "<B"
    """Give the gradient of the input to the stage before."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one stage does with one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def peer(self) -> int:
        """The stage at the other end of a send or receive; itself for forward and backward."""
        if self.kind in {Kind.RECV_INPUT, Kind.SEND_GRADIENT}:
            return self.stage - 1
        if self.kind in {Kind.SEND_OUTPUT, Kind.RECV_GRADIENT}:
            return self.stage + 1
        return self.stage

    @property
    def moves(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind not in {Kind.FORWARD, Kind.BACKWARD}

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Work = list[tuple[Kind, int, int]]
"""Forwards and backwards of one rank in order: kind, stage, microbatch."""

FORWARD_COST, BACKWARD_COST = 1.0, 2.0
"""A backward computes two products where a forward computes one."""


def make(name: str, ranks: int, microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """For each rank the actions of the schedule `name`, moves included."""
    return with_moves(
        [_WORK[name](rank, ranks, microbatches, virtual) for rank in range(ranks)], ranks
    )


def forwards(schedules: list[list[Action]]) -> list[list[Action]]:
    """For each rank the same schedule without its backwards, as evaluation runs it."""
    work = [[one for one in own if one[0] is Kind.FORWARD] for own in _work_of(schedules)]
    return with_moves(work, len(schedules))


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[Action]]:
    """1F1B with one stage a rank; see `_alternating`."""
    return make("1f1b", stages, microbatches)


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


def _alternate(forwards: Work, backwards: Work, warmup: int) -> Work:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left."""
    warmup = min(warmup, len(forwards))
    work = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        work += [forward, backward]
    return work + backwards[len(forwards) - warmup :]


_WORK = {"naive": _naive, "gpipe": _gpipe, "1f1b": _alternating, "interleaved": _interleaved}


@dataclass(frozen=True, slots=True)
class Span:
    """When a forward or backward runs, in units of a forward of a whole rank's layers."""

    begin: float
    end: float
    rank: int
    action: Action


def timeline(work: list[Work]) -> list[Span]:
    """When each forward and backward runs if moves are free, in order of their ends.

    Raises ValueError when the lists wait for each other forever.
    """
    ranks = len(work)
    stages = 1 + max(stage for one in work for _, stage, _ in one)
    share = ranks / stages
    ended: dict[tuple[Kind, int, int], float] = {}
    clock = [0.0] * ranks
    at = [0] * ranks
    spans = []
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(work):
            while at[rank] < len(own) and all(
                one in ended for one in _needs(own[at[rank]], stages)
            ):
                key = own[at[rank]]
                begin = max(clock[rank], *(ended[one] for one in _needs(key, stages)), 0.0)
                cost = FORWARD_COST if key[0] is Kind.FORWARD else BACKWARD_COST
                clock[rank] = ended[key] = begin + cost * share
                spans.append(Span(begin, clock[rank], rank, Action(*key)))
                at[rank] += 1
                moved = True
    if any(done < len(own) for done, own in zip(at, work, strict=True)):
        raise ValueError("the stages of this schedule wait for each other")
    return sorted(spans, key=lambda span: (span.end, span.begin, span.rank))


def bubble(schedules: list[list[Action]]) -> float:
    """The share of time in which ranks idle, from the first forward to the last backward."""
    spans = timeline(_work_of(schedules))
    busy = sum(span.end - span.begin for span in spans)
    return 1 - busy / (len(schedules) * max(span.end for span in spans))


def in_flight(schedules: list[list[Action]]) -> list[int]:
    """For each rank the most microbatches (of one stage each) whose activations it holds."""
    peaks = []
    for work in _work_of(schedules):
        held = most = 0
        for kind, _, _ in work:
            held += 1 if kind is Kind.FORWARD else -1
            most = max(most, held)
        peaks.append(most)
    return peaks


def with_moves(work: list[Work], ranks: int) -> list[list[Action]]:
    """Add to forwards and backwards what they take and give.

    Moves enter both lists at one moment, when the giver has made the value, so all lists follow
    one order of all moves: no two ranks can wait for each other, not even where a send ends only
    when it is received. A receive is only begun there; it is waited for where it is used.
    """
    stages = 1 + max(stage for one in work for _, stage, _ in one)
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    for span in timeline(work):
        action = span.action
        lists[span.rank].append(action)
        forward = action.kind is Kind.FORWARD
        if action.stage == (stages - 1 if forward else 0):
            continue
        send = Action(
            Kind.SEND_OUTPUT if forward else Kind.SEND_GRADIENT, action.stage, action.microbatch
        )
        receive = Action(
            Kind.RECV_INPUT if forward else Kind.RECV_GRADIENT, send.peer, action.microbatch
        )
        lists[span.rank].append(send)
        lists[send.peer % ranks].append(receive)
    return lists


def _needs(key: tuple[Kind, int, int], stages: int) -> list[tuple[Kind, int, int]]:
    kind, stage, microbatch = key
    if kind is Kind.FORWARD:
        return [(kind, stage - 1, microbatch)] if stage else []
    after = [(kind, stage + 1, microbatch)] if stage < stages - 1 else []
    return [(Kind.FORWARD, stage, microbatch), *after]


def _work_of(schedules: list[list[Action]]) -> list[Work]:
    return [[(a.kind, a.stage, a.microbatch) for a in one if not a.moves] for one in schedules]
