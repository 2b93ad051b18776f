"""The planner's closed forms are what the schedules' lists show; else it would plan other pipelines
than the trainer runs."""

from __future__ import annotations

import pytest

from trainer.parallel import schedule, timeline
from trainer.planner.bubble import bubble, in_flight


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zero-bubble", "interleaved"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_closed_forms_equal_the_lists(name: str, ranks: int, groups: int) -> None:
    if name == "interleaved" and ranks == 1:
        return
    for virtual in (2, 3) if name == "interleaved" else (1,):
        count = ranks * groups
        lists = schedule.make(name, ranks, count, virtual)
        assert bubble(name, ranks, count, virtual) == pytest.approx(timeline.bubble(lists))
        assert list(in_flight(name, ranks, count, virtual)) == timeline.in_flight(lists)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_fewer_microbatches_than_stages(name: str) -> None:
    lists = schedule.make(name, 4, 2)
    assert bubble(name, 4, 2) == pytest.approx(timeline.bubble(lists))
    assert list(in_flight(name, 4, 2)) == timeline.in_flight(lists)


def test_the_bubbles_that_everyone_quotes() -> None:
    assert round(bubble("1f1b", 4, 8), 2) == 0.27
    assert round(bubble("1f1b", 8, 64), 2) == 0.10
