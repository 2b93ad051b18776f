"""Steps replayed with other durations, and stages of unequal work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.readers import read_paths
from playbooks import replay
from playbooks.evidence import Evidence
from playbooks.metrics import what_if
from playbooks.policy import Policy
from playbooks.replay import Await, Issue, Program, Transfer, Work
from playbooks.rules import stages
from tests.playbooks.playbooks_jobs import Job, ddp

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "straggler"
EVERY = replace(Policy(), warmup_steps=0, replay_steps=1000, replay_events=10**9)


def meeting(*work: float, transfer: float = 2.0) -> Program:
    """Each rank computes, then all meet in one collective."""
    events: dict[int, list[replay.Event]] = {}
    for rank, seconds in enumerate(work):
        part = Transfer(rank, 0, ("dp", "all_reduce"), transfer, False)
        events[rank] = [Work(rank, ("forward", "1"), seconds), Issue(part), Await((part,))]
    return Program(0, events, {0: len(work)}, 0.0)


def test_a_collective_ends_after_its_last_member() -> None:
    assert replay.run(meeting(1.0, 5.0, 3.0), lambda x: x.seconds) == 7.0
    assert replay.run(meeting(1.0, 5.0, 3.0), lambda _: 1.0) == 2.0


def test_an_operation_overlaps_what_comes_before_its_wait() -> None:
    part = Transfer(0, 0, ("dp", "all_reduce"), 4.0, False)
    other = Transfer(1, 0, ("dp", "all_reduce"), 4.0, False)
    events: dict[int, list[replay.Event]] = {
        0: [Issue(part), Work(0, ("backward", "1"), 3.0), Await((part,))],
        1: [Issue(other), Work(1, ("backward", "1"), 6.0), Await((other,))],
    }
    assert replay.run(Program(0, events, {0: 2}, 0.0), lambda x: x.seconds) == 6.0


def test_a_send_into_a_buffer_waits_for_nobody() -> None:
    send = Transfer(0, 0, ("pp", "send"), 1.0, True)
    receive = Transfer(1, 0, ("pp", "recv"), 1.0, False)
    events: dict[int, list[replay.Event]] = {
        0: [Issue(send), Await((send,)), Work(0, ("forward", "1"), 1.0)],
        1: [Work(1, ("forward", "1"), 9.0), Issue(receive), Await((receive,))],
    }
    assert replay.run(Program(0, events, {0: 2}, 0.0), lambda x: x.seconds) == 10.0


def test_operations_that_wait_for_each_other_are_said() -> None:
    a = [Transfer(rank, 0, ("tp", "all_reduce"), 1.0, False) for rank in (0, 1)]
    b = [Transfer(rank, 1, ("tp", "all_reduce"), 1.0, False) for rank in (0, 1)]
    events: dict[int, list[replay.Event]] = {
        0: [Issue(a[0]), Await((a[0],)), Issue(b[0])],
        1: [Issue(b[1]), Await((b[1],)), Issue(a[1])],
    }
    with pytest.raises(ValueError, match="wait for each other"):
        replay.run(Program(0, events, {0: 2, 1: 2}, 0.0), lambda x: x.seconds)


def test_the_replay_of_a_job_gives_its_measured_step_and_blames_who_is_slow() -> None:
    found = what_if.answer(Evidence(ddp(slow={2: 60.0}).collected()), EVERY)
    assert found is not None
    assert found["replayed_s"] == pytest.approx(found["measured_s"], rel=0.05)
    assert found["slowdown"] > 1.3
    shares = {rank: part["share"] for rank, part in found["by_rank"].items()}
    assert max(shares, key=lambda rank: shares[rank]) == "2"
    assert shares["2"] > 0.8
    assert found["by_kind"]["forward"]["share"] > 0.8


def test_an_even_job_has_nothing_to_gain() -> None:
    found = what_if.answer(Evidence(ddp().collected()), EVERY)
    assert found is not None
    assert found["slowdown"] == pytest.approx(1.0, abs=0.02)


def test_without_steps_or_operations_nothing_is_said() -> None:
    assert what_if.answer(Evidence(Job(4).collected()), EVERY) is None
    alone = Job(1)
    alone.step(0, 0, 0.0, 100.0)
    assert what_if.answer(Evidence(alone.collected()), EVERY) is None


def pipeline(work: dict[int, float], steps: int = 12) -> Job:
    """Two stages of two ranks (0, 1 and 2, 3); each rank computes for `work` and meets the rest."""
    job = Job(4)
    world = job.group("world", 0, 1, 2, 3)
    clock = 0.0
    for step in range(steps):
        end = clock + max(work.values()) + 4
        for rank in range(4):
            job.rank(rank, pp=rank // 2)
            done = clock + work[rank]
            job.step(rank, step, clock, end)
            job.phase(rank, step, "forward", clock, done, stage=rank // 2)
            wait = round((end - 1 - done) * 1_000_000)
            job.call(rank, world, step, done, end - 1, step=step, wait_ns=wait)
        clock = end
    return job


def test_a_stage_all_of_whose_ranks_are_slow_is_named() -> None:
    job = pipeline({0: 50.0, 1: 51.0, 2: 90.0, 3: 91.0})
    (found,) = stages.rule(Evidence(job.collected(shuffle=1)), Policy())
    assert found.cause == "slow.stage-imbalance"
    assert found.ranks == (2, 3)
    assert "the last" in found.summary
    assert any(item.source == "replay" for item in found.evidence)


def test_one_slow_rank_of_a_stage_is_no_imbalance_of_stages() -> None:
    job = pipeline({0: 50.0, 1: 51.0, 2: 52.0, 3: 91.0})
    assert stages.rule(Evidence(job.collected()), Policy()) == []


def test_stages_of_even_work_and_jobs_without_stages_are_left_alone() -> None:
    even = pipeline({0: 50.0, 1: 51.0, 2: 54.0, 3: 55.0})
    assert stages.rule(Evidence(even.collected()), Policy()) == []
    assert stages.rule(Evidence(ddp(slow={1: 60.0}).collected()), Policy()) == []
    assert stages.rule(Evidence(Job(4).collected()), Policy()) == []


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not beside the checkout")
def test_the_published_what_if_numbers_of_a_production_job_come_out() -> None:
    """S and S_x of ByteDance's analysis, and M_S of the last stage, within 1 %."""
    told = json.loads((DATA / "result-ST.json").read_text())
    evidence = Evidence(read_paths([str(DATA / "trace-ST.parquet")]))
    found = what_if.answer(evidence, EVERY)
    assert found is not None
    assert found["slowdown"] == pytest.approx(told["blocking_slowdown"], rel=0.01)
    for stage, slowdown in told["blocking_decompose_by_stage"].items():
        assert found["by_stage"][stage]["slowdown"] == pytest.approx(slowdown, rel=0.01)
    last = json.loads((DATA / "ms-ST.json").read_text())["Ms"]
    assert found["by_stage"]["3"]["share"] == pytest.approx(last, rel=0.01)
    worst = json.loads((DATA / "mw-ST.json").read_text())["Mw"]
    assert found["by_rank"]["7"]["share"] == pytest.approx(worst, abs=0.001)
    names = {"forward-compute": "forward", "backward-compute": "backward",
             "optimizer": "optimizer", "embedding-grads-all-reduce": "pp all_reduce",
             "grads-reduce-scatter": "dp reduce_scatter"}  # fmt: skip
    for theirs, ours in names.items():
        slowdown = told["blocking_decompose_by_optype"][theirs]
        assert found["by_kind"][ours]["slowdown"] == pytest.approx(slowdown, rel=0.01)
    (root,) = stages.rule(evidence, Policy())
    assert root.ranks == (6, 7)
