"""What a schedule's lists foretell: when each action runs, how long ranks idle, what they hold.

In: lists of actions, and what each kind costs on each stage. Out: spans of time, the bubble, the
microbatches in flight; and the same lists with the moves between ranks put in. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.parallel.actions import COMPUTES, FREES, GIVES_BACK, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.parallel.actions import Work

    Costs = Mapping[tuple[Kind, int], float]
    """What a kind of action costs on a stage."""


@dataclass(frozen=True, slots=True)
class Span:
    """When an action that computes runs, in the unit of the costs."""

    begin: float
    end: float
    rank: int
    action: Action


def costs(loads: Sequence[float], recomputed: Sequence[float] = ()) -> Costs:
    """Costs on stages that a forward takes `loads` on, of which `recomputed` are done twice.

    A backward computes two products where a forward computes one: a half of it costs one forward.
    """
    twice = recomputed or [0.0] * len(loads)
    table: dict[tuple[Kind, int], float] = {}
    for stage, (load, again) in enumerate(zip(loads, twice, strict=True)):
        table[Kind.FORWARD, stage] = table[Kind.WEIGHT_GRADIENT, stage] = load
        table[Kind.INPUT_GRADIENT, stage] = load + again
        table[Kind.BACKWARD, stage] = 2 * load + again
    return table


def timeline(work: Sequence[Work], given: Costs | None = None) -> list[Span]:
    """When each action runs if moves are free, in order of their ends.

    Without costs the stages are equal, and a forward of all of a rank's stages takes 1.
    Raises ValueError when the lists wait for each other forever.
    """
    ranks = len(work)
    stages = 1 + max(stage for one in work for _, stage, _ in one)
    cost = given or costs([ranks / stages] * stages)
    halves = any(kind is Kind.INPUT_GRADIENT for one in work for kind, _, _ in one)
    ended: dict[tuple[Kind, int, int], float] = {}
    clock = [0.0] * ranks
    at = [0] * ranks
    spans = []
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(work):
            while at[rank] < len(own):
                key = own[at[rank]]
                needs = _needs(key, stages, halves=halves)
                if not all(one in ended for one in needs):
                    break
                begin = max(clock[rank], *(ended[one] for one in needs), 0.0)
                clock[rank] = ended[key] = begin + cost[key[0], key[1]]
                spans.append(Span(begin, clock[rank], rank, Action(*key)))
                at[rank] += 1
                moved = True
    if any(done < len(own) for done, own in zip(at, work, strict=True)):
        raise ValueError("the stages of this schedule wait for each other")
    return sorted(spans, key=lambda span: (span.end, span.begin, span.rank))


def bubble(schedules: Sequence[Sequence[Action]], given: Costs | None = None) -> float:
    """The share of time in which ranks idle, from the first forward to the last backward."""
    spans = timeline(work_of(schedules), given)
    busy = sum(span.end - span.begin for span in spans)
    return 1 - busy / (len(schedules) * max(span.end for span in spans))


def in_flight(schedules: Sequence[Sequence[Action]]) -> list[int]:
    """For each rank the most microbatches (of one stage each) of which it holds something.

    Where backwards come in halves a microbatch counts until the second, which needs the inputs and
    gradients of products but no longer the rest: there it is an upper bound.
    """
    return [_most(work) for work in work_of(schedules)]


def in_flight_of_stages(schedules: Sequence[Sequence[Action]]) -> list[int]:
    """The same for each stage alone."""
    lists = work_of(schedules)
    stages = 1 + max(stage for work in lists for _, stage, _ in work)
    owners = [lists[stage % len(lists)] for stage in range(stages)]
    return [_most([one for one in work if one[1] == at]) for at, work in enumerate(owners)]


def _most(work: Work) -> int:
    held = most = 0
    for kind, _, _ in work:
        held += (kind is Kind.FORWARD) - (kind in FREES)
        most = max(most, held)
    return most


def with_moves(work: Sequence[Work], ranks: int) -> list[list[Action]]:
    """Add to what ranks compute what they take and give.

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
        ends = action.stage == (stages - 1 if forward else 0)
        if ends or not (forward or action.kind in GIVES_BACK):
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


def work_of(schedules: Sequence[Sequence[Action]]) -> list[Work]:
    """What each rank computes."""
    return [
        [(a.kind, a.stage, a.microbatch) for a in one if a.kind in COMPUTES] for one in schedules
    ]


def _needs(key: tuple[Kind, int, int], stages: int, *, halves: bool) -> list[tuple[Kind, int, int]]:
    """What must have ended before an action can begin."""
    kind, stage, microbatch = key
    if kind is Kind.FORWARD:
        return [(kind, stage - 1, microbatch)] if stage else []
    if kind is Kind.WEIGHT_GRADIENT:
        return [(Kind.INPUT_GRADIENT, stage, microbatch)]
    gives = Kind.INPUT_GRADIENT if halves else Kind.BACKWARD
    after = [(gives, stage + 1, microbatch)] if stage < stages - 1 else []
    return [(Kind.FORWARD, stage, microbatch), *after]
