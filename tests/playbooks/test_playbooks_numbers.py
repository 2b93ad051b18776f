"""Metrics and the matrices below them: each against a value worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from playbooks_jobs import MS, Job, ddp, mesh

from playbooks import metrics
from playbooks.blocking import waits
from playbooks.evidence import Evidence
from playbooks.policy import Policy
from playbooks.timeline import covered, exclusive


def measure(job: Job) -> dict[str, object]:
    return metrics.measure(Evidence(job.collected()), Policy())


def test_step_time_is_the_median_without_warm_up() -> None:
    job = Job(2)
    for rank in range(2):
        start = 0.0
        for step, length in enumerate([900, 100, 110, 120]):
            job.step(rank, step, start, start + length, tokens=1000.0)
            start += length
    got = measure(job)
    assert got["step_time_s"] == pytest.approx(0.110)
    assert got["tokens_per_s"] == pytest.approx(3000 / 0.330)
    assert got["steps"] == 4
    assert got["steps_measured"] == 3


def test_what_no_source_tells_is_none_not_zero() -> None:
    got = measure(Job(2))
    assert got["step_time_s"] is None
    assert got["tokens_per_s"] is None
    assert got["loss"] is None
    assert got["data_wait_share"] is None
    assert got["arrival_skew"] is None
    assert got["bubble"] is None
    assert got["mfu"] is None


def test_phase_shares_of_every_rank_sum_to_one() -> None:
    got = measure(ddp(slow={1: 30.0}, data=9.0))
    shares = got["phase_shares"]
    assert isinstance(shares, dict)
    assert set(shares) == {"0", "1", "2", "3"}
    for one in shares.values():
        assert sum(one.values()) == pytest.approx(1.0)
        assert all(value >= 0 for value in one.values())


def test_a_phase_inside_another_counts_once() -> None:
    job = Job(1)
    for step in range(3):
        t = step * 100.0
        job.step(0, step, t, t + 100)
        job.phase(0, step, "forward", t, t + 80)
        job.phase(0, step, "communication", t + 20, t + 50)
    shares = measure(job)["phase_shares"]
    assert isinstance(shares, dict)
    assert shares["0"] == pytest.approx({"forward": 0.5, "communication": 0.3, "other": 0.2})


def by_hand(intervals: list[tuple[int, int]]) -> list[int]:
    """Exclusive time by counting every instant for the innermost interval that holds it."""
    own = [0] * len(intervals)
    for moment in range(60):
        inside = [i for i, (a, b) in enumerate(intervals) if a <= moment < b]
        if inside:
            own[max(inside, key=lambda i: (intervals[i][0], -intervals[i][1]))] += 1
    return own


def nested(dice: random.Random, low: int, high: int, depth: int) -> list[tuple[int, int]]:
    """Random properly nested intervals."""
    out = []
    at = low
    while at < high - 1:
        start = dice.randrange(at, high)
        end = dice.randrange(start + 1, high + 1)
        out.append((start, end))
        if depth and end - start > 2:
            out += nested(dice, start + 1, end, depth - 1)
        at = end
    return out


@pytest.mark.parametrize("seed", range(40))
def test_exclusive_time_of_any_nesting(seed: int) -> None:
    intervals = nested(random.Random(seed), 0, 60, 3)
    intervals = list(dict.fromkeys(intervals))
    random.Random(seed + 1).shuffle(intervals)
    start = np.array([a for a, _ in intervals], np.int64)
    end = np.array([b for _, b in intervals], np.int64)
    assert exclusive(start, end).tolist() == by_hand(intervals), f"seed {seed}"


def test_overlapping_intervals_are_covered_once() -> None:
    start, end = covered(np.array([5, 0, 2]), np.array([9, 3, 6]))
    assert list(zip(start, end, strict=True)) == [(0, 3), (3, 6), (6, 9)]


def test_waits_are_summed_by_axis() -> None:
    got = measure(mesh(steps=12))
    waited = got["exposed_comm"]
    assert isinstance(waited, dict)
    # Stage 0 waits 1 ms in tp and stage 1 likewise, in every step.
    assert waited["tp"] == pytest.approx(0.001)
    assert waited["pp"] > 0.03


def test_the_bubble_is_predicted_by_the_formula() -> None:
    bubble = measure(mesh(steps=12))["bubble"]
    assert isinstance(bubble, dict)
    assert bubble["stages"] == 2
    assert bubble["predicted"] == pytest.approx(1 / 2)
    assert 0 < bubble["measured"] < 1


def test_arrival_skew_names_who_came_last() -> None:
    job = Job(3)
    group = job.group("dp", 0, 1, 2)
    for seq in range(10):
        for rank, late in ((0, 0), (1, 30), (2, 2)):
            job.call(rank, group, seq, 100 * seq + late, 100 * seq + 40)
    skew = measure(job)["arrival_skew"]
    assert isinstance(skew, dict)
    assert skew["median_s"] == pytest.approx(0.030)
    last = skew["last"][0]
    assert (last["rank"], last["share"]) == (1, 1.0)
    # Against the one before it, ten times.
    assert last["imposed_wait_s"] == pytest.approx(10 * 0.028)
    assert skew["latest"][0]["late_s"] == pytest.approx(0.028)


def test_memory_peaks_keep_what_is_unknown() -> None:
    job = Job(2)
    job.rows["memory"] += [
        {"rank": 0, "rss": 100, "peak": 7},
        {"rank": 0, "rss": 300, "allocated": 9},
        {"rank": 1, "rss": 50},
    ]
    assert measure(job)["peak_memory"] == {
        "0": {"device": 9, "rss": 300},
        "1": {"device": None, "rss": 50},
    }


def operations(*, blocking: bool, seed: int) -> Job:
    """Two ranks, five operations a step with noise; the host waits for them or goes on."""
    dice = random.Random(seed)
    job = Job(2)
    group = job.group("dp", 0, 1)
    clock = 0.0
    for step in range(12):
        for rank in range(2):
            job.step(rank, step, clock, clock + 1000)
            t = clock
            for number in range(5):
                flight = dice.uniform(5, 40)
                job.call(rank, group, 5 * step + number, t, t + flight, step=step)
                t += dice.uniform(50, 60) + (flight if blocking else 0)
        clock += 1000
    return job


@pytest.mark.parametrize("seed", range(5))
def test_operations_that_block_are_told_from_those_that_do_not(seed: int) -> None:
    for blocking in (True, False):
        ledger = Evidence(operations(blocking=blocking, seed=seed).collected()).ledger
        _begin, counts = waits(ledger)
        share = counts.mean()
        assert share == pytest.approx(1.0 if blocking else 0.2), f"seed {seed}"


def test_a_measured_wait_is_taken_as_it_is() -> None:
    job = Job(1)
    group = job.group("dp", 0)
    job.call(0, group, 0, 0, 100, wait_ns=30 * MS)
    ledger = Evidence(job.collected()).ledger
    begin, counts = waits(ledger)
    assert counts.tolist() == [True]
    assert (ledger.end - begin).tolist() == [30 * MS]
