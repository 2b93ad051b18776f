"""Circles of waits, and operations whose own record came too late."""

from __future__ import annotations

import pytest
from playbooks_jobs import Job

from playbooks.engine import diagnose


def _circle(*, closed: bool) -> Job:
    job = Job(3, loose=True)
    a, b, c = job.group("dp", 0, 1), job.group("tp", 1, 2), job.group("pp", 2, 0)
    for seq in range(1, 4):
        for group, ranks in ((a, (0, 1)), (b, (1, 2)), (c, (2, 0))):
            for rank in ranks:
                job.call(rank, group, seq, seq * 10, seq * 10 + 1)
    job.call(0, a, 4, 50)
    job.call(1, b, 4, 50)
    if closed:
        job.call(2, c, 4, 50)
    return job


@pytest.mark.parametrize("seed", range(4))
def test_a_circle_of_waits_is_an_order_of_groups(seed: int) -> None:
    verdict = diagnose(_circle(closed=True).collected(seed)).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.where) == ("hang.collective-mismatch", "group-order")
    assert verdict.ranks == (0, 1, 2)


def test_a_chain_that_ends_at_a_rank_outside_is_a_stall() -> None:
    verdict = diagnose(_circle(closed=False).collected()).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.ranks) == ("hang.rank-stalled", (2,))


def test_no_waits_no_circle() -> None:
    job = Job(2, loose=True)
    group = job.group("dp", 0, 1)
    for rank in (0, 1):
        job.call(rank, group, 1, 1, 2)
    assert diagnose(job.collected()).verdict is None


def _late_record(op: str, *, others: int) -> Job:
    job = Job(3, loose=True)
    group = job.group("dp", 0, 1, 2)
    for rank in range(3):
        job.call(rank, group, 1, 1, 2, op=op)
    job.call(0, group, 2, 10, op=op)
    for rank in range(1, 1 + others):
        job.call(rank, group, 2, 10, 11, op=op)
    return job


def test_an_operation_that_all_others_completed_is_done() -> None:
    assert diagnose(_late_record("all_reduce", others=2).collected()).health is not None


def test_an_operation_that_a_member_never_entered_is_pending() -> None:
    verdict = diagnose(_late_record("all_reduce", others=1).collected()).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.ranks) == ("hang.rank-stalled", (2,))


def test_a_broadcast_that_others_left_may_still_run_here() -> None:
    assert diagnose(_late_record("broadcast", others=2).collected()).health is None
