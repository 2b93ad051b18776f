"""Stragglers and data-bound jobs: exactly the right rank, and silence on healthy ones."""

from __future__ import annotations

import pytest
from playbooks_jobs import Job, ddp, mesh

from playbooks.engine import diagnose
from playbooks.evidence import Evidence
from playbooks.policy import Policy
from playbooks.report import text
from playbooks.rules import data, straggler


@pytest.mark.parametrize("rank", range(4))
def test_ddp_names_the_slow_rank_although_backward_hides_the_wait(rank: int) -> None:
    report = diagnose(ddp(slow={rank: 60.0}, since=6).collected())
    assert report.verdict is not None
    assert report.verdict.cause == "slow.straggler-compute"
    assert report.verdict.ranks == (rank,)
    assert "since step 6" in report.verdict.summary
    assert report.verdict.formula is not None


@pytest.mark.parametrize("rank", range(4))
def test_pipeline_and_tensor_peers_that_wait_are_not_blamed(rank: int) -> None:
    report = diagnose(mesh(slow=rank, since=5).collected())
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("slow.straggler-compute", (rank,))


def test_slow_from_the_first_step_is_at_most_likely() -> None:
    report = diagnose(ddp(slow={2: 60.0}).collected())
    assert report.verdict is not None
    assert report.verdict.ranks == (2,)
    assert report.verdict.confidence == "likely"


def test_slow_data_of_one_rank_is_input_not_compute() -> None:
    report = diagnose(ddp(slow_data={1: 70.0}, since=4).collected())
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("slow.straggler-input", (1,))


def test_waits_of_the_others_are_an_effect_of_the_straggler() -> None:
    report = diagnose(ddp(slow={3: 60.0}, since=4).collected())
    effects = [f for f in report.findings if f.role == "effect"]
    assert [(f.cause, f.caused_by) for f in effects] == [
        ("slow.comm-exposed", "slow.straggler-compute")
    ]


@pytest.mark.parametrize("job", [ddp(), mesh(), ddp(2), ddp(slow={1: 6.0})])
def test_healthy_jobs_stay_healthy(job: Job) -> None:
    report = diagnose(job.collected())
    assert report.verdict is None
    assert report.health is not None


def test_a_slow_rank_that_changes_is_no_straggler() -> None:
    job = Job(4)
    for step in range(24):
        part = ddp(steps=1, slow={step % 4: 60.0})
        for name in ("steps", "phases", "collectives"):
            for row in part.rows[name]:
                moved = {
                    k: v + step * 10**9 if k.endswith("_ns") and v is not None else v
                    for k, v in row.items()
                }
                moved["step"] = step
                if name == "collectives":
                    moved["seq"] = 2 * step + row["seq"]
                job.rows[name].append(moved)
    job.group("dp", 0, 1, 2, 3)
    assert straggler.rule(Evidence(job.collected()), Policy()) == []


def test_too_few_steps_name_nobody() -> None:
    job = ddp(steps=4, slow={1: 80.0})
    assert straggler.rule(Evidence(job.collected()), Policy()) == []


def test_without_collectives_busy_time_says_nothing() -> None:
    job = ddp(slow={1: 60.0})
    job.rows["collectives"] = []
    assert straggler.rule(Evidence(job.collected()), Policy()) == []


def test_a_heavier_stage_is_not_called_a_straggler() -> None:
    """pp=2 with one rank a stage, uneven from the begin: layers, not a slow rank."""
    job = Job(2)
    for rank in range(2):
        job.rank(rank, pp=rank)
    pipe = job.group("pp", 0, 1)
    for step in range(20):
        t = step * 100.0
        job.step(0, step, t, t + 100)
        job.step(1, step, t, t + 100)
        job.call(0, pipe, step, t + 40, t + 41, op="send", peer=1, step=step, wait_ns=0)
        job.call(1, pipe, step, t, t + 41, op="recv", peer=0, step=step, wait_ns=41_000_000)
        job.call(0, pipe, step, t + 41, t + 98, op="recv", peer=1, step=step, wait_ns=57_000_000)
        job.call(1, pipe, step, t + 97, t + 98, op="send", peer=0, step=step, wait_ns=0)
    assert diagnose(job.collected()).verdict is None


def test_most_ranks_waiting_for_batches_is_data_bound() -> None:
    report = diagnose(ddp(data=60.0).collected())
    assert report.verdict is not None
    assert report.verdict.cause == "slow.data-bound"
    assert report.verdict.ranks == ()


def test_ordinary_loading_is_not_data_bound() -> None:
    assert data.rule(Evidence(ddp(data=10.0).collected()), Policy()) == []


def test_the_threshold_is_the_policys() -> None:
    job = ddp(slow={1: 9.0}, since=5).collected()
    assert straggler.rule(Evidence(job), Policy()) == []
    strict = Policy(straggler_share=0.05)
    assert [f.ranks for f in straggler.rule(Evidence(job), strict) if f.role == "root"] == [(1,)]


def _queued(job: Job, rank: int, since: int, ran: float, waited: float) -> Job:
    """Every step says what the thread ran; `rank` also waited for a core from `since` on."""
    for row in job.rows["steps"]:
        late = row["rank"] == rank and row["step"] >= since
        row["cpu_ns"], row["queued_ns"] = round(ran * 1e6), round(waited * 1e6) if late else 0
    return job


def test_a_rank_that_waited_for_a_core_is_not_slow() -> None:
    contended = _queued(ddp(slow={2: 60.0}, since=6), rank=2, since=6, ran=20.0, waited=60.0)
    report = diagnose(contended.collected())
    assert report.verdict is None
    assert report.health is not None


def test_a_rank_that_computed_all_that_time_is_slow_though_cores_are_shared() -> None:
    job = _queued(ddp(slow={2: 60.0}, since=6), rank=2, since=6, ran=200.0, waited=30.0)
    report = diagnose(job.collected())
    assert report.verdict is not None
    assert report.verdict.ranks == (2,)


def test_the_share_of_the_step_that_ranks_waited_for_a_core_is_told() -> None:
    job = ddp()
    for row in job.rows["steps"]:
        row["cpu_ns"], row["queued_ns"] = 1, (row["end_ns"] - row["start_ns"]) // 4
    report = diagnose(job.collected())
    assert report.metrics["core_wait_share"] == pytest.approx(0.25, abs=1e-3)
    assert "25 % of the step" in text.render(report)
    assert diagnose(ddp().collected()).metrics["core_wait_share"] is None


def test_of_two_busy_ranks_neither_is_accused() -> None:
    """Two of four that share a crowded core are above the median, and neither sets the pace."""
    job = ddp(slow={0: 40.0, 1: 44.0}, since=6)
    named = straggler.rule(Evidence(job.collected()), Policy())
    assert all(f.ranks != (1,) for f in named)


def test_a_rank_that_works_a_multiple_is_slow_though_the_step_is_long_for_all() -> None:
    """All ranks queue for cores most of the step; one of them computes three times as long."""
    job = Job(4)
    group = job.group("dp", 0, 1, 2, 3)
    for step in range(24):
        start = step * 1500.0
        for rank in range(4):
            slow = rank == 1 and step >= 8
            ran = 160.0 if slow else 50.0
            job.step(rank, step, start, start + 1490.0)
            row = job.rows["steps"][-1]
            row["cpu_ns"] = round(ran * 1e6)
            row["queued_ns"] = round(600e6 if slow else 100e6)
            issue = start + (760.0 if slow else 150.0)
            job.call(
                rank,
                group,
                step + 1,
                issue,
                start + 1490.0,
                wait_ns=round((start + 1490.0 - issue) * 1e6),
            )
    found = straggler.rule(Evidence(job.collected()), Policy())
    assert [(f.cause, f.ranks) for f in found if f.role == "root"] == [
        ("slow.straggler-compute", (1,))
    ]
