"""The benchmark's own arithmetic: a figure that is wrong here is wrong in every claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diag.bench.rows import Row, interval, paired
from diag.bench.trainer import duel


def test_the_interval_holds_the_median_and_narrows_without_noise() -> None:
    middle, low, high = interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert middle == 3.0
    assert low <= middle <= high <= 100.0
    assert interval([2.0] * 5) == (2.0, 2.0, 2.0)


def test_pairs_swap_who_goes_first() -> None:
    order: list[str] = []

    def note(name: str, value: int) -> int:
        order.append(name)
        return value

    plain, watched = paired(lambda: note("plain", 1), lambda: note("watched", 2), 3)
    assert (plain, watched) == ([1, 1, 1], [2, 2, 2])
    assert order == ["plain", "watched", "watched", "plain", "plain", "watched"]


@pytest.mark.parametrize(
    ("low", "high", "below", "above"),
    [(0.8, 0.9, True, False), (1.1, 1.2, False, True), (0.9, 1.1, None, None)],
)
def test_a_goal_is_judged_only_where_the_interval_lies_on_one_side(
    low: float, high: float, below: bool | None, above: bool | None
) -> None:
    row = Row("x", (low + high) / 2, "x", low, high, goal=1.0)
    assert row.as_json()["met"] is below
    assert replace(row, at_least=True).as_json()["met"] is above
    assert replace(row, goal=None).as_json()["met"] is None
    assert set(row.as_json()) == {"case", "value", "unit", "low", "high", "goal", "met"}


@pytest.mark.ranks
def test_the_plain_scripts_train_the_same_model_as_the_trainer() -> None:
    """The duel itself refuses to compare two that learn differently."""
    told = duel("tensor", 2)
    assert [len(told[side]) for side in ("ours", "theirs")] == [2, 2]
