"""A schedule that deadlocks, forgets a microbatch or holds too many activations stops a run."""

from __future__ import annotations

import pytest

from trainer.parallel.actions import Action, Kind
from trainer.parallel.drawing import draw
from trainer.parallel.schedule import make
from trainer.parallel.timeline import (
    bubble,
    costs,
    in_flight,
    in_flight_of_stages,
    timeline,
    work_of,
)

NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
SHAPES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 4, 7, 8, 16, 33)]
MIRROR = {Kind.SEND_OUTPUT: Kind.RECV_INPUT, Kind.SEND_GRADIENT: Kind.RECV_GRADIENT}


def batches(actions: list[Action]) -> list[list[Action]]:
    """What the executor starts at once: one action at a time."""
    return [[action] for action in actions]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_every_microbatch_goes_forward_and_back_once(stages: int, microbatches: int) -> None:
    for stage, actions in enumerate(make("1f1b", stages, microbatches)):
        assert {action.stage for action in actions} == {stage}
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(microbatches))
        moved = {kind for kind in Kind if any(a.kind is kind for a in actions)}
        assert (Kind.RECV_INPUT in moved) == (Kind.SEND_GRADIENT in moved) == (stage > 0)
        assert (Kind.SEND_OUTPUT in moved) == (Kind.RECV_GRADIENT in moved) == (stage < stages - 1)


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_in_flight_is_bounded(stages: int, microbatches: int) -> None:
    for stage, actions in enumerate(make("1f1b", stages, microbatches)):
        held = most = 0
        for action in actions:
            held += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, held)
        assert most == min(stages - stage, microbatches)
        assert held == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_it_runs_to_the_end_even_when_every_send_waits_for_its_receive(
    name: str, ranks: int, microbatches: int
) -> None:
    """The strictest backend: a move ends only when the peer has started its half."""
    if name == "interleaved" and ranks == 1:
        ranks = 2  # one rank with several stages is refused
    virtual = 3 if name == "interleaved" else 1
    microbatches *= ranks if name == "interleaved" else 1
    schedules = [batches(actions) for actions in make(name, ranks, microbatches, virtual)]
    stages = ranks * virtual
    at = [0] * ranks
    started: set[Action] = set()
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(schedules):
            if at[stage] == len(steps):
                continue
            step = steps[at[stage]]
            started.update(step)
            if all(_can_end(action, started, done, stages) for action in step):
                done.update(step)
                at[stage] += 1
                moved = True
    assert at == [len(steps) for steps in schedules], "the schedule deadlocks"


def _can_end(action: Action, started: set[Action], done: set[Action], stages: int) -> bool:
    """Whether what the action needs is there."""
    s, m = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return s == 0 or Action(Kind.RECV_INPUT, s, m) in done
    if action.kind is Kind.WEIGHT_GRADIENT:
        return Action(Kind.INPUT_GRADIENT, s, m) in done
    if action.kind in {Kind.BACKWARD, Kind.INPUT_GRADIENT}:
        forward = Action(Kind.FORWARD, s, m) in done
        return forward and (s == stages - 1 or Action(Kind.RECV_GRADIENT, s, m) in done)
    if action.kind in MIRROR:
        given = Action(MIRROR[action.kind], action.peer, m) in started
        backward = {Action(Kind.BACKWARD, s, m), Action(Kind.INPUT_GRADIENT, s, m)}
        made = {Action(Kind.FORWARD, s, m)} if action.kind is Kind.SEND_OUTPUT else backward
        return bool(made & done) and given
    back = next(send for send, receive in MIRROR.items() if receive is action.kind)
    return Action(back, action.peer, m) in started


def test_three_stages_four_microbatches_as_drawn() -> None:
    drawn = ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    ours = [" ".join(str(a) for a in actions if not a.moves) for actions in make("1f1b", 3, 4)]
    assert ours == drawn


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_predictions_from_the_lists_are_the_known_formulas(ranks: int, microbatches: int) -> None:
    p, m = ranks, microbatches
    assert bubble(make("naive", p, m)) == pytest.approx((p - 1) / p)
    for name in ("gpipe", "1f1b"):
        assert bubble(make(name, p, m)) == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        assert bubble(make("interleaved", p, m, v)) == pytest.approx((p - 1) / (v * m + p - 1))
    assert in_flight(make("naive", p, m)) == [1] * p
    assert in_flight(make("gpipe", p, m)) == [m] * p
    assert in_flight(make("1f1b", p, m)) == [min(p - rank, m) for rank in range(p)]
    fill = [min(2 * m, 2 * (p - rank - 1) + p + 1) for rank in range(p)]
    assert in_flight(make("interleaved", p, m, 2)) == fill


def test_interleaved_runs_each_stage_of_a_microbatch_once() -> None:
    for rank, actions in enumerate(make("interleaved", 4, 8, 2)):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            done = sorted((a.stage, a.microbatch) for a in actions if a.kind is kind)
            assert done == [(stage, i) for stage in (rank, rank + 4) for i in range(8)]


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_does_each_thing_once_for_each_microbatch(name: str) -> None:
    for p, m in [(p, m) for p in range(1, 9) for m in range(1, 9)]:
        virtual = 2 if name == "interleaved" else 1
        if name == "interleaved" and (p == 1 or m % p):
            continue  # refused
        halves = {Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}
        kinds = {Kind.FORWARD} | (halves if name == "zero-bubble" else {Kind.BACKWARD})
        for rank, work in enumerate(work_of(make(name, p, m, virtual))):
            wanted = {
                (kind, stage, i)
                for kind in kinds
                for stage in range(rank, p * virtual, p)
                for i in range(m)
            }
            assert len(work) == len(wanted)
            assert set(work) == wanted


def test_weight_gradients_fill_the_drain_of_zero_bubble() -> None:
    """The closed form of ZB-H1, also with fewer microbatches than ranks, where no more can fill."""
    for p, m in [(p, m) for p in range(1, 9) for m in range(1, 9)]:
        lists = make("zero-bubble", p, m)
        idle = p - 1 + max(0, p - m)
        assert bubble(lists) == pytest.approx(idle / (3 * m + idle)), (p, m)
        assert bubble(lists) <= bubble(make("1f1b", p, m)) + 1e-12
        assert max(in_flight(lists)) == max(in_flight(make("1f1b", p, m))) == min(p, m)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_rank_begins_first_and_ends_last(name: str) -> None:
    """What makes its span the measure of a pipeline's time (see stopwatch.bubble)."""
    for p, m in [(p, m) for p in range(2, 9) for m in range(1, 9)]:
        if name == "interleaved" and m % p:
            continue
        spans = timeline(work_of(make(name, p, m, 2 if name == "interleaved" else 1)))
        own = [span for span in spans if span.rank == 0]
        assert min(span.begin for span in own) == 0.0
        assert max(span.end for span in own) == pytest.approx(max(span.end for span in spans))


def test_uneven_stages_and_recomputation_make_a_larger_bubble() -> None:
    lists = make("1f1b", 4, 8)
    even = bubble(lists, costs([2, 2, 2, 2]))
    assert even == pytest.approx(bubble(lists))
    assert bubble(lists, costs([1, 2, 2, 3])) > even
    assert bubble(lists, costs([2, 2, 2, 2], [2, 2, 2, 2])) == pytest.approx(even)
    assert bubble(lists, costs([2, 2, 2, 2], [2, 0, 0, 0])) > even
    slow_weights = {key: 2.0 if key[0] is Kind.WEIGHT_GRADIENT else 1.0 for key in costs([1] * 4)}
    assert bubble(make("zero-bubble", 4, 8), slow_weights) < 3 / (3 * 8 + 3)


def test_stages_of_a_rank_hold_their_own_share_in_flight() -> None:
    lists = make("interleaved", 2, 4, 2)
    own = in_flight_of_stages(lists)
    assert len(own) == 4
    whole = in_flight(lists)
    assert all(one <= whole[stage % 2] for stage, one in enumerate(own))
    assert in_flight_of_stages(make("1f1b", 3, 8)) == [3, 2, 1]


def test_a_schedule_is_drawn_as_it_runs() -> None:
    assert draw(make("zero-bubble", 2, 2)) == [
        "rank 0  F0 F1    I0 W0 I1 W1",
        "rank 1     F0 I0 F1 I1 W0 W1",
    ]
    assert draw(make("1f1b", 2, 2)) == [
        "rank 0  F0 F1       B0       B1",
        "rank 1     F0 B0    F1 B1",
    ]
    several = draw(make("interleaved", 2, 2, 2))
    assert several[0].startswith("rank 0  F0a F1a F0b F1b")
    long = draw(make("gpipe", 2, 12))
    assert all("F11" in row and "B11" in row for row in long)
