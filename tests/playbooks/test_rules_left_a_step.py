"""Ranks that leave a step: out of batches, after a caught error, or alone in a barrier."""

from __future__ import annotations

import pytest
from playbooks_jobs import Job

from playbooks.engine import diagnose

CLOSED = "builtins.RuntimeError: Connection closed by peer [127.0.0.1]:9"


def _steps(job: Job, last: int) -> str:
    """Whole steps 0 to `last` of 100 ms on every rank, two collectives each."""
    group = job.group("dp", *range(job.world))
    for rank in range(job.world):
        for step in range(last + 1):
            job.step(rank, step, 100 * step, 100 * step + 99)
            for part in range(2):
                when = 100 * step + 40 * part + rank
                seq = 2 * step + part
                job.call(rank, group, seq, when, when + 10, step=step, shape=f"[{part + 1}]")
    return group


def _left(*, step_ended: bool = True, exit_code: int = 0, closed: bool = True) -> Job:
    """Rank 1 ends after step 5; its peers wait for it in step 6 and then see it gone."""
    job = Job(3)
    group = _steps(job, 5)
    if not step_ended:
        job.step(1, 6, 600, None)
    job.died(1, 640, exit_code=exit_code, closed=closed)
    for rank in (0, 2):
        job.step(rank, 6, 600, None)
        job.call(rank, group, 12, 601, step=6, shape="[1]")
        job.raised(rank, 645, CLOSED)
        job.died(rank, 650, exit_code=1, closed=True)
    job.failed()
    return job


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_rank_that_ends_well_while_others_begin_a_step_had_fewer_batches(
    seed: int | None,
) -> None:
    verdict = diagnose(_left().collected(seed)).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.ranks) == ("hang.uneven-inputs", (1,))
    assert verdict.confidence == "likely"


@pytest.mark.parametrize("odd", [{"step_ended": False}, {"exit_code": 3}, {"closed": False}])
def test_a_rank_that_ends_inside_a_step_or_not_well_had_not(odd: dict[str, int]) -> None:
    found = diagnose(_left(**odd).collected()).findings
    assert "hang.uneven-inputs" not in {f.cause for f in found}


def test_ranks_that_all_end_after_the_same_step_had_as_many() -> None:
    job = Job(3)
    _steps(job, 5)
    for rank in range(3):
        job.died(rank, 640 + 900 * rank, exit_code=0, closed=True)
    assert "hang.uneven-inputs" not in {f.cause for f in diagnose(job.collected()).findings}


def _ahead(caught: int, *, step_after: bool = False) -> Job:
    """Rank 1 is in the first collective of step 7, its peers in the last one of step 6."""
    job = Job(3)
    group = _steps(job, 5)
    for rank in range(3):
        job.step(rank, 6, 600, 620 if rank == 1 else None)
        job.call(rank, group, 12, 601 + rank, 610, step=6, shape="[1]")
        odd = rank == 1
        job.call(rank, group, 13, 640 + rank, step=7 if odd else 6, shape="[1]" if odd else "[2]")
    job.step(1, 7, 630, None)
    kinds = ["train.caught"] * caught + ["train.step"] * step_after
    for number, kind in enumerate(kinds):
        job.rows["log_events"].append(
            {
                "time_ns": None,
                "kind": kind,
                "fields": '{"step": 7}' if kind == "train.step" else '{"message": "skipping"}',
                "quote": "step 6: out of memory, skipping batch",
                "source": "job.stdout",
                "locator": f"line {40 + number}",
            }
        )
    job.died(1, 660, signal=6)
    job.failed()
    return job


def test_a_rank_a_step_ahead_after_a_caught_error_swallowed_it() -> None:
    verdict = diagnose(_ahead(1).collected()).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.ranks) == ("hang.exception-swallowed", (1,))
    assert verdict.confidence == "likely"
    assert any(item.locator == "line 40" for item in verdict.evidence)


@pytest.mark.parametrize(("caught", "after"), [(0, False), (1, True), (3, False)])
def test_without_such_an_error_a_rank_ahead_is_no_certain_mismatch(
    caught: int, after: bool
) -> None:
    """None was caught, the job went on after it, or every rank caught one."""
    verdict = diagnose(_ahead(caught, step_after=after).collected()).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.ranks) == ("hang.collective-mismatch", (1,))
    assert verdict.confidence == "likely"


def _alone(rank: int, *, after: float) -> Job:
    """One rank enters a barrier after step 5, the others the first collective of step 6."""
    job = Job(4)
    group = _steps(job, 5)
    for one in range(4):
        if one == rank:
            job.call(one, group, 12, after, step=5, op="barrier", shape=None, dtype=None)
        else:
            job.step(one, 6, 600, None)
            job.call(one, group, 12, 601, step=6, shape="[1]")
    job.hang(610, 9000)
    job.run.update(state="running", exit_code=None)
    return job


@pytest.mark.parametrize(
    ("rank", "after", "cause"),
    [
        (0, 599.5, "hang.collective-extra"),
        (2, 599.5, "hang.collective-mismatch"),
        (0, 598.0, "hang.collective-mismatch"),
    ],
)
def test_a_barrier_of_rank_0_between_two_steps_is_one_too_many(
    rank: int, after: float, cause: str
) -> None:
    """Another rank, or inside its step: it may as well stand in place of what the others do."""
    verdict = diagnose(_alone(rank, after=after).collected()).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.ranks, verdict.confidence) == (cause, (rank,), "likely")
