"""Links: if these break, a link sent to a colleague opens something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.address import Address, parse, parse_ranks, rank_text
from dashboards.figures.selection import Selection

ranks = st.none() | st.sets(st.integers(0, 2000), min_size=1, max_size=40).map(
    lambda s: tuple(sorted(s))
)
bound = st.none() | st.integers(0, 10**6)


@given(st.none() | st.text(st.characters(codec="utf-8"), min_size=1), ranks, bound, bound)
def test_what_a_link_says_is_what_it_was_made_from(run, some, first, last) -> None:
    made = Address("/timeline", run, Selection(some, first, last))
    assert parse("/timeline", made.search()) == made


def test_links_are_short_and_readable() -> None:
    made = Address("/", "1402-train", Selection((0, 1, 2, 3, 8), 10, 20))
    assert made.to("/timeline") == "/timeline?run=1402-train&ranks=0-3,8&steps=10-20"
    assert Address("/", None, Selection(None, 7, 7)).search() == "?step=7"
    assert Address().search() == ""


@pytest.mark.parametrize(
    "search",
    ["?ranks=x&steps=a-b&step=-3", "?ranks=&steps=", "?%ff=1&ranks=%00", "garbage", "?ranks=²"],
)
def test_what_cannot_be_understood_is_as_if_not_said(search: str) -> None:
    assert parse("/", search).chosen == Selection()


def test_a_huge_range_costs_little() -> None:
    found = parse_ranks("0-999999999,5-999999998")
    assert found is not None
    assert len(found) < 200_000


def test_ranges() -> None:
    assert rank_text((5, 0, 1, 2)) == "0-2,5"
    assert parse_ranks("0-2,5") == (0, 1, 2, 5)
    assert parse_ranks("3-1") is None
