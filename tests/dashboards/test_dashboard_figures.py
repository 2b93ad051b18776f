"""Figures: if these break, a picture lies: parts that do not add up, boxes lost, nulls as zeros."""

from __future__ import annotations

import itertools

import dashboard_synthetic as synthetic
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.annotate import AXES, PHASES
from collectors.collected import empty
from collectors.schema import table
from dashboards.figures import shares, steps, timeline
from dashboards.figures import topology as graph
from dashboards.figures.nesting import alone, parents
from dashboards.figures.palette import AXIS_COLOURS, PHASE_COLOURS, phase_colour
from dashboards.figures.raster import CELLS, cover
from dashboards.figures.selection import Selection, ranks_of, step_span, time_span
from dashboards.figures.theme import Drawn, Missing, plain

ALL = Selection()
FIGURES = (shares.time_bar, shares.per_rank, steps.step_time, steps.loss, timeline.timeline)


def of(result: object) -> Drawn:
    assert isinstance(result, Drawn)
    return result


def test_every_phase_and_axis_has_a_colour_of_its_own() -> None:
    assert tuple(PHASE_COLOURS) == PHASES
    assert set(AXIS_COLOURS) == {*AXES, "world", "unknown"}
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)
    assert len(set(AXIS_COLOURS.values())) == len(AXIS_COLOURS)
    assert phase_colour("no such phase") == PHASE_COLOURS["other"]


def test_the_time_bar_sums_to_100_and_waiting_is_communication() -> None:
    bars = of(shares.time_bar(synthetic.healthy(), ALL, "light")).figure.data
    percent = {bar.name: bar.x[0] for bar in bars}
    assert sum(percent.values()) == pytest.approx(100)
    # Each 100 ms step: 5 data, 30 forward and 45 backward of which 4 each wait, 10 optimizer,
    # and 10 that no phase covers.
    assert percent["data"] == pytest.approx(5)
    assert percent["forward"] == pytest.approx(26)
    assert percent["backward"] == pytest.approx(41)
    assert percent["optimizer"] == pytest.approx(10)
    assert percent["communication"] == pytest.approx(8)
    assert percent["other"] == pytest.approx(10)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_every_moment_counts_once_whatever_nests_or_overlaps(pairs: list[tuple[int, int]]) -> None:
    kinds = itertools.cycle(PHASES)
    rows = [
        {"rank": 0, "phase": next(kinds), "start_ns": 1000 + a, "end_ns": 1000 + a + b}
        for a, b in pairs
    ]
    made = empty()
    made.tables["phases"] = table("phases", rows)
    found = shares.shares(made, ALL)
    assert found is not None
    first = min(a for a, _ in pairs)
    last = max(a + b for a, b in pairs)
    assert found.seconds.sum() * 1e9 == pytest.approx(last - first, abs=1e-3)
    assert (found.seconds >= 0).all()


def test_the_inner_phase_is_taken_from_the_outer() -> None:
    made = empty()
    made.tables["phases"] = table(
        "phases",
        [
            {"rank": 0, "phase": "backward", "start_ns": 0, "end_ns": 100},
            {"rank": 0, "phase": "communication", "start_ns": 20, "end_ns": 50},
        ],
    )
    found = shares.shares(made, ALL)
    assert found is not None
    assert dict(zip(found.phases, (found.seconds[0] * 1e9).round(), strict=True)) == {
        "backward": 70,
        "communication": 30,
    }


def test_each_rank_has_a_stack_that_sums_to_100() -> None:
    drawn = of(shares.per_rank(synthetic.healthy(slow=2), ALL, "dark")).figure
    assert list(drawn.data[0].y) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    np.testing.assert_allclose(sum(np.asarray(bar.x) for bar in drawn.data), 100)
    forward = next(bar for bar in drawn.data if bar.name == "forward")
    assert np.argmax(forward.x) == 2


def test_many_ranks_become_a_heat_map_that_shows_who_is_apart() -> None:
    drawn = of(shares.per_rank(synthetic.healthy(ranks=40, steps=3, slow=17), ALL, "light"))
    (heat,) = drawn.figure.data
    assert heat.type == "heatmap"
    forward = [name.startswith("forward") for name in heat.y].index(True)
    assert int(np.argmax(heat.z[forward])) == 17
    assert "40 ranks" in drawn.note


@pytest.mark.parametrize("figure", FIGURES)
def test_no_data_is_said_and_never_drawn(figure) -> None:
    missing = figure(empty(), ALL, "light")
    assert isinstance(missing, Missing)
    assert missing.what.startswith("No ")


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_table_of_nulls_breaks_nothing(figure, theme) -> None:
    made = empty()
    for name in ("steps", "phases", "collectives", "groups"):
        made.tables[name] = table(name, [{}, {}])
    assert isinstance(figure(made, ALL, theme), Missing)
    made.tables["phases"] = table("phases", [{"rank": 0, "start_ns": 5}, {"rank": 1}])
    made.tables["steps"] = table("steps", [{"rank": 0, "step": 1, "start_ns": 5}])
    assert isinstance(figure(made, ALL, theme), Missing | Drawn)


def test_step_time_has_a_line_a_rank_and_leaves_running_steps_out() -> None:
    made = synthetic.healthy(ranks=3, steps=5)
    rows = [
        *made.rows("steps"),
        {"rank": 0, "step": 5, "start_ns": synthetic.T0 + 500 * synthetic.MS},
    ]
    made.tables["steps"] = table("steps", rows)
    drawn = of(steps.step_time(made, ALL, "light")).figure
    assert [line.name for line in drawn.data] == ["rank 0", "rank 1", "rank 2"]
    assert list(drawn.data[0].x) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(drawn.data[0].y, 0.1)


def test_many_ranks_become_fastest_median_slowest_and_the_slowest_is_named() -> None:
    made = synthetic.healthy(ranks=20, steps=4)
    rows = made.rows("steps")
    for row in rows:
        if row["rank"] == 7 and row["step"] == 2:
            row["end_ns"] += 50 * synthetic.MS
    made.tables["steps"] = table("steps", rows)
    drawn = of(steps.step_time(made, ALL, "light"))
    slowest = drawn.figure.data[2]
    assert [line.name for line in drawn.figure.data][2] == "slowest rank"
    assert slowest.y[2] == pytest.approx(0.15)
    assert slowest.customdata[2] == " (rank 7)"
    assert "20 ranks" in drawn.note


def test_a_long_run_is_thinned_but_its_worst_step_stays() -> None:
    rows = [
        {"rank": 0, "step": s, "start_ns": s * 100, "end_ns": s * 100 + (90 if s == 3210 else 10)}
        for s in range(5000)
    ]
    made = empty()
    made.tables["steps"] = table("steps", rows)
    drawn = of(steps.step_time(made, ALL, "light"))
    line = drawn.figure.data[0]
    assert len(line.x) == steps.POINTS_AT_MOST
    assert line.x[int(np.argmax(line.y))] == 3210
    assert "several steps" in drawn.note


def test_loss_is_shown_whichever_rank_has_it_and_nan_is_said() -> None:
    made = synthetic.healthy(ranks=2, steps=4)
    chosen = Selection(ranks=(0,))
    assert list(of(steps.loss(made, chosen, "light")).figure.data[0].x) == [0, 1, 2, 3]
    rows = made.rows("steps")
    for row in rows:
        if row["step"] == 2 and row["loss"] is not None:
            row["loss"] = float("nan")
    made.tables["steps"] = table("steps", rows)
    drawn = of(steps.loss(made, ALL, "light"))
    assert list(drawn.figure.data[0].x) == [0, 1, 3]
    assert "first at step 2" in drawn.note


def _count(drawn: Drawn) -> int:
    return sum(len(bar.x) for bar in drawn.figure.data if bar.type == "bar")


def test_the_timeline_draws_every_box_once_in_its_own_colour() -> None:
    made = synthetic.healthy(ranks=4, steps=6)
    drawn = of(timeline.timeline(made, ALL, "light"))
    assert _count(drawn) == 4 * 6 * (4 + 2)
    assert drawn.note == ""
    colours = {bar.marker.color for bar in drawn.figure.data}
    assert {PHASE_COLOURS["forward"], AXIS_COLOURS["tp"], AXIS_COLOURS["dp"]} <= colours
    assert dict(drawn.legend)["collectives by axis"] == (
        ("dp", AXIS_COLOURS["dp"]),
        ("tp", AXIS_COLOURS["tp"]),
    )
    texts = [t for bar in drawn.figure.data for t in bar.customdata]
    assert any("all_reduce #0" in t and "rank 3" in t and "4.0 KiB" in t for t in texts)


def test_the_timeline_keeps_to_the_chosen_ranks_and_steps() -> None:
    made = synthetic.healthy(ranks=4, steps=6)
    drawn = of(timeline.timeline(made, Selection((1, 3), 2, 3), "light"))
    assert _count(drawn) == 2 * 2 * 6
    assert list(drawn.figure.layout.yaxis.ticktext) == ["rank 1", "rank 3"]
    low, high = drawn.figure.layout.xaxis.range
    assert low == pytest.approx(0.2, abs=0.01)
    assert high == pytest.approx(0.4, abs=0.01)


def test_what_never_ended_reaches_the_last_time_seen_and_is_hatched() -> None:
    drawn = of(timeline.timeline(synthetic.stalled(), ALL, "light"))
    hatched = [bar for bar in drawn.figure.data if bar.marker.pattern.shape == "/"]
    assert sum(len(bar.x) for bar in hatched) == 4 + 3
    data = next(bar for bar in hatched if bar.marker.color == PHASE_COLOURS["data"])
    assert data.base[0] + data.x[0] == pytest.approx(2.9)
    assert "not ended" in data.customdata[0]


def test_too_many_boxes_become_a_raster_until_one_zooms_in() -> None:
    made = synthetic.healthy(ranks=4, steps=400)
    drawn = of(timeline.timeline(made, ALL, "light"))
    (heat,) = drawn.figure.data
    assert heat.type == "heatmap"
    assert heat.z.size <= CELLS * 3 / 2
    assert "9,600 boxes" in drawn.note
    near = of(timeline.timeline(made, ALL, "light", window=(10.0, 10.5)))
    assert 0 < _count(near) <= 4 * 7 * 6
    # The range of the whole stays the figure's own, so that a double click leads back.
    assert near.figure.layout.xaxis.range == drawn.figure.layout.xaxis.range


def test_the_raster_covers_what_the_boxes_cover() -> None:
    rng = np.random.default_rng(7)
    start = rng.uniform(-2, 12, 300)
    end = start + rng.uniform(0, 5, 300)
    row, kind = rng.integers(0, 3, 300), rng.integers(0, 2, 300)
    got = cover(row, kind, start, end, (3, 10, 2))
    want = np.zeros((3, 10, 2))
    for b in range(10):
        inside = np.clip(np.minimum(end, b + 1) - np.maximum(start, b), 0, None)
        np.add.at(want[:, b], (row, kind), inside)
    np.testing.assert_allclose(got, want, atol=1e-9)


def test_foreign_text_is_never_markup() -> None:
    made = synthetic.hostile()
    for drawn in (
        of(timeline.timeline(made, ALL, "light", mark=(synthetic.T0, synthetic.HOSTILE))),
        of(shares.time_bar(made, ALL, "light")),
        of(shares.per_rank(made, ALL, "light")),
        of(graph.topology(made.topologies[0], "light")),
    ):
        shown = str(drawn.figure.to_dict())
        assert "&lt;img" in shown
        assert "<img" not in shown
        assert "<script" not in shown
    assert plain("<b>&") == "&lt;b&gt;&amp;"


def test_the_topology_has_every_end_and_link_and_the_groups_of_the_plan() -> None:
    made = synthetic.placed()
    drawn = of(graph.topology(made.topologies[1], "dark", made.plan, "tp", 1))
    lines = {t.name: t for t in drawn.figure.data if t.mode == "lines"}
    assert set(lines) == {"nvlink (28)", "pcie-switch (8)", "socket (24)"}
    assert lines["socket (24)"].visible == "legendonly"
    assert "socket" in drawn.note
    gpus = next(t for t in drawn.figure.data if t.name == "GPU")
    assert gpus.text[0] == "<b>GPU0</b><br>rank 8"
    assert len(set(gpus.marker.color[:4])) == 1
    assert len(set(gpus.marker.color)) == 2
    nics = next(t for t in drawn.figure.data if t.name == "NIC")
    assert list(nics.text) == ["NIC0", "NIC1", "NIC2", "NIC3"]
    assert len(set(zip(nics.x, nics.y, strict=True))) == 4


def test_spans_and_ranks_come_from_what_is_there() -> None:
    made = synthetic.healthy(ranks=2, steps=3)
    made.world_size = 4
    assert ranks_of(made) == [0, 1, 2, 3]
    assert step_span(made) == (0, 2)
    assert time_span(made) == (synthetic.T0, synthetic.T0 + 300 * synthetic.MS + synthetic.MS // 10)
    assert time_span(empty()) is None
    assert step_span(empty()) is None


def test_a_stop_lasts_until_the_job_ends_or_its_host_was_last_sampled() -> None:
    made = synthetic.stalled()
    made.run.update(ended_ns=synthetic.T0 + 60_000 * synthetic.MS)
    assert time_span(made) == (synthetic.T0, synthetic.T0 + 60_000 * synthetic.MS)
    made.run.update(ended_ns=None, state="running")
    made.tables["hosts"] = table("hosts", [{"time_ns": synthetic.T0 + 30_000 * synthetic.MS}])
    assert time_span(made) == (synthetic.T0, synthetic.T0 + 30_000 * synthetic.MS)
    # A run in which everything ended is not made longer by what its host did afterwards.
    done = synthetic.healthy()
    done.run.update(ended_ns=synthetic.T0 + 60_000 * synthetic.MS)
    assert time_span(done) != time_span(made)
    assert time_span(done)[1] < synthetic.T0 + 3_000 * synthetic.MS


def test_what_a_dead_rank_left_open_ends_with_its_process() -> None:
    made = synthetic.stalled()
    made.run.update(ended_ns=synthetic.T0 + 60_000 * synthetic.MS)
    made.tables["ranks"] = table(
        "ranks", [{"rank": 1, "ended_ns": synthetic.T0 + 2_100 * synthetic.MS, "signal": 9}]
    )
    drawn = of(timeline.timeline(made, Selection((0, 1)), "light"))
    ends = {
        bar.customdata[0].splitlines()[0]: bar.base[0] + bar.x[0]
        for bar in drawn.figure.data
        if bar.marker.pattern.shape == "/" and bar.marker.color in PHASE_COLOURS.values()
    }
    assert sorted(round(e, 1) for e in ends.values()) == [2.1, 60.0]


def test_in_the_raster_too_an_inner_phase_is_taken_from_the_outer() -> None:
    rows = []
    for step in range(timeline.SHAPES // 2):
        at = synthetic.T0 + step * 100
        rows += [
            {"rank": 0, "phase": "backward", "start_ns": at, "end_ns": at + 100},
            {"rank": 0, "phase": "communication", "start_ns": at + 20, "end_ns": at + 90},
            {"rank": 1, "phase": "backward", "start_ns": at, "end_ns": at + 100},
            {"rank": 1, "phase": "communication", "start_ns": at + 20, "end_ns": at + 40},
        ]
    made = empty()
    made.tables["phases"] = table("phases", rows)
    (heat,) = of(timeline.timeline(made, ALL, "light")).figure.data
    wide = {row[0] for row in (heat.text[0], heat.text[3]) if set(row) == {row[0]}}
    assert wide == {"rank 0 · mostly communication", "rank 1 · mostly backward"}


def test_each_box_finds_the_one_that_holds_it() -> None:
    rank = np.asarray([0, 0, 0, 0, 1, 1])
    start = np.asarray([0, 10, 20, 60, 0, 50])
    end = np.asarray([100, 50, 30, 90, 40, 70])
    assert parents(rank, start, end).tolist() == [-1, 0, 1, 0, -1, -1]


def test_collectives_alone_take_the_whole_row() -> None:
    made = synthetic.healthy(ranks=2, steps=2)
    made.tables["phases"] = table("phases")
    drawn = of(timeline.timeline(made, ALL, "light"))
    assert {bar.width for bar in drawn.figure.data} == {timeline.ALONE[1]}
    assert sorted({float(y) for bar in drawn.figure.data for y in bar.y}) == [0.0, 1.0]
    assert [title for title, _ in drawn.legend] == ["collectives by axis"]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)),
        min_size=1,
        max_size=14,
    )
)
@settings(max_examples=300, deadline=None)
def test_own_times_are_those_of_a_clock_that_asks_at_every_moment(some) -> None:
    some = sorted(some, key=lambda b: (b[0], b[1], -b[2]))
    rank, start, length = (np.asarray(column, dtype=np.int64) for column in zip(*some, strict=True))
    end = start + length
    want = np.zeros(len(rank), dtype=np.int64)
    for one in range(3):
        for moment in range(61):
            running = (rank == one) & (start <= moment) & (moment < end)
            if running.any():
                want[np.flatnonzero(running)[-1]] += 1
    np.testing.assert_array_equal(alone(rank, start, end), want)
