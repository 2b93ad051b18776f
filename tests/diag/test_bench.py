"""The benchmark's own arithmetic: a figure that is wrong here is wrong in every claim."""

from __future__ import annotations

import pytest

from diag.bench.rows import Row, interval, paired


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


@pytest.mark.parametrize(("value", "met"), [(0.9, True), (1.0, True), (1.1, False)])
def test_a_goal_is_met_or_not(value: float, met: bool) -> None:
    assert Row("x", value, "%", goal=1.0).as_json()["met"] is met
    assert Row("x", value, "%").as_json()["met"] is None
