"""Jobs that stand still or disagree: who is named, who is not, and how surely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playbooks_jobs import Job, at, ddp

from playbooks.engine import diagnose
from playbooks.evidence import Evidence
from playbooks.ledger import free_sizes
from playbooks.policy import Policy
from playbooks.rules import mismatch, stall, transport
from playbooks.rules.common import own_frame

if TYPE_CHECKING:
    from playbooks.finding import Finding
    from playbooks.report.model import Report


def verdict(report: Report) -> Finding:
    assert report.verdict is not None, report.abstained or report.health
    return report.verdict


def stalled(culprit: int = 2, phase: str = "data", *, looks: int = 2, moved: bool = False) -> Job:
    """Ten good steps, then `culprit` stays in `phase` while the others are in an all-reduce."""
    job = ddp(steps=10)
    start = 950.0
    group = job.group("dp", 0, 1, 2, 3)
    for rank in range(4):
        job.step(rank, 10, start, None)
        if rank == culprit:
            job.phase(rank, 10, phase, start, None)
        else:
            job.phase(rank, 10, "data", start, start + 2)
            job.phase(rank, 10, "backward", start + 2, None)
            job.call(rank, group, 20, start + 40 + rank, step=10)
    job.hang(start + 50, start + 8050)
    job.run["state"] = "running"
    job.run["exit_code"] = None
    for look in range(looks):
        name = f"read_{look}" if moved else "read"
        job.stack(culprit, look, f"{name} (/job/loader.py:{88 + look})", "main (/job/train.py:10)")
    return job


@pytest.mark.parametrize("culprit", range(4))
def test_a_rank_stuck_in_its_data_is_named_while_the_job_lives(culprit: int) -> None:
    report = diagnose(stalled(culprit).collected())
    found = verdict(report)
    assert (found.cause, found.ranks, found.where) == ("hang.rank-stalled", (culprit,), "data")
    assert found.confidence == "certain"
    assert found.group == "dp[0..3]"
    assert found.advice[0].startswith("data:")
    assert any(i.source == "captures/0001-hang/stacks-1.json" for i in found.evidence)
    waiting = [f for f in report.findings if f.role == "effect"]
    assert waiting and all(f.caused_by == "hang.rank-stalled" for f in waiting)


@pytest.mark.parametrize(
    ("phase", "where"),
    [("checkpoint", "checkpoint"), ("evaluation", "evaluation"), ("compile", "compile")],
)
def test_the_open_phase_says_where(phase: str, where: str) -> None:
    assert verdict(diagnose(stalled(1, phase).collected())).where == where


def test_frames_say_where_when_no_phase_is_open() -> None:
    job = stalled(1, looks=0)
    job.rows["phases"] = [r for r in job.rows["phases"] if r["end_ns"] is not None]
    for look in range(2):
        job.stack(1, look, "_next_data (torch/utils/data/dataloader.py:700)", "main (t.py:1)")
    assert verdict(diagnose(job.collected())).where == "data"


def test_one_look_is_at_most_likely() -> None:
    assert verdict(diagnose(stalled(looks=1).collected())).confidence == "likely"


def test_a_rank_whose_frames_change_is_slow_not_stuck() -> None:
    found = verdict(diagnose(stalled(moved=True).collected()))
    assert (found.cause, found.ranks) == ("hang.slow-not-dead", (2,))
    assert found.confidence == "likely"


def test_a_job_that_went_on_has_no_hang() -> None:
    job = ddp(steps=30)
    job.hang(500, 900)
    report = diagnose(job.collected())
    assert report.health is not None
    assert [f.role for f in report.findings] == ["context"]
    assert report.findings[0].cause == "hang.slow-not-dead"


def test_ends_after_the_hang_are_effects_of_it() -> None:
    job = stalled()
    for rank in range(4):
        job.died(rank, 12_000 + rank, signal=9 if rank == 0 else 15)
    job.run["state"] = "finished"
    job.failed(143)
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks) == ("hang.rank-stalled", (2,))


def test_phases_closed_by_the_kill_do_not_hide_where_it_was() -> None:
    job = stalled()
    for row in job.rows["phases"] + job.rows["collectives"]:
        if row["end_ns"] is None:
            row["end_ns"] = at(12_000)
            row["state"] = "failed" if "state" in row else None
    for row in job.rows["phases"]:
        row.pop("state", None)
    assert verdict(diagnose(job.collected())).where == "data"


def chain() -> Job:
    """pp=2 tp=2; rank 1 stuck, rank 0 waits in tp, 2 and 3 in receives, all in three groups."""
    job = Job(4)
    job.run.update(state="running", exit_code=None)
    tp = job.group("tp", 0, 1)
    pipes = {2: job.group("pp", 0, 2), 3: job.group("pp", 1, 3)}
    for rank in range(4):
        job.step(rank, 0, 0, 90)
        job.step(rank, 1, 100, None)
    job.call(0, tp, 1, 10, 11)
    job.call(1, tp, 1, 10, 11)
    job.call(0, tp, 2, 120)
    job.call(2, pipes[2], 1, 101, op="recv", peer=0)
    job.call(3, pipes[3], 1, 102, op="recv", peer=1)
    job.phase(1, 1, "forward", 100, None)
    job.hang(120, 9000)
    return job


def test_chains_over_groups_lead_to_the_rank_that_waits_for_nobody() -> None:
    report = diagnose(chain().collected())
    found = verdict(report)
    assert (found.cause, found.ranks, found.where) == ("hang.rank-stalled", (1,), "user-code")
    assert "other 3 ranks" in found.summary


def test_no_sign_of_life_is_no_name() -> None:
    """Rank 3 left nothing: dead, stuck or not collected look the same."""
    job = Job(4, loose=True)
    group = job.group("world", 0, 1, 2, 3)
    for rank in range(3):
        job.call(rank, group, 7, 10 + rank)
    report = diagnose(job.collected())
    assert report.verdict is None
    assert report.abstained is not None
    assert "rank 3" in report.abstained.because
    assert "rank 3" in report.abstained.need[0]


def test_a_group_without_declared_members_names_nobody_absent() -> None:
    job = Job(4, loose=True)
    group = job.group("world", 0, 1, 2, 3, declared=False)
    for rank in range(3):
        job.call(rank, group, 7, 10 + rank, 20)
    report = diagnose(job.collected())
    assert report.verdict is None


def all_inside(missing: int | None = None) -> Job:
    job = Job(4)
    job.run.update(state="running", exit_code=None)
    group = job.group("world", 0, 1, 2, 3)
    for rank in range(4):
        job.call(rank, group, 1, 5, 6)
        if rank != missing:
            job.call(rank, group, 2, 10 + rank)
    job.hang(14, 9000)
    return job


def test_all_in_and_none_out_is_transport_at_most_likely() -> None:
    found = verdict(diagnose(all_inside().collected()))
    assert (found.cause, found.confidence, found.ranks) == ("hang.transport", "likely", ())


def test_one_member_outside_is_not_transport() -> None:
    evidence = Evidence(all_inside(missing=1).collected())
    assert transport.rule(evidence, Policy()) == []
    assert [f.ranks for f in stall.rule(evidence, Policy())] == [(1,)]


def mixed(odd: dict[int, str], world: int = 4, *, done: bool = False) -> Job:
    job = Job(world)
    group = job.group("world", *range(world))
    for rank in range(world):
        job.call(rank, group, 1, 5, 6)
        job.call(rank, group, 2, 10 + rank, 20 if done else None, shape=odd.get(rank, "[128]"))
    return job


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_minority_is_named_whatever_the_order(culprit: int, seed: int | None) -> None:
    job = mixed({culprit: "[256]"})
    for rank in range(4):
        if rank != culprit:
            job.died(rank, 500, signal=6 if rank % 2 else 15)
    job.failed()
    found = verdict(diagnose(job.collected(shuffle=seed)))
    assert (found.cause, found.ranks) == ("hang.collective-mismatch", (culprit,))
    assert found.confidence == "certain"
    assert "[256]" in found.summary and "[128]" in found.summary


def test_the_aborts_after_a_mismatch_are_effects() -> None:
    job = mixed({0: "[256]"})
    job.died(3, 400, signal=6)
    job.raised(2, 420, "builtins.RuntimeError: Connection closed by peer [127.0.0.1]:9")
    job.died(1, 450, signal=15)
    job.failed()
    report = diagnose(job.collected())
    effects = {f.cause: f.caused_by for f in report.findings if f.role == "effect"}
    assert set(effects) == {"crash.native-fault", "crash.user-exception", "hang.rank-died"}
    assert set(effects.values()) == {"hang.collective-mismatch"}


def test_unequal_sizes_that_completed_are_corrupted_results() -> None:
    assert verdict(diagnose(mixed({1: "[64]"}, done=True).collected())).ranks == (1,)


def test_two_against_two_names_both_and_is_at_most_likely() -> None:
    found = verdict(diagnose(mixed({0: "[1]", 1: "[1]"}).collected()))
    assert (found.ranks, found.confidence) == ((0, 1, 2, 3), "likely")


def test_equal_signatures_are_no_mismatch() -> None:
    assert mismatch.rule(Evidence(mixed({}).collected()), Policy()) == []


@pytest.mark.parametrize("op", ["all_to_all", "gather", "scatter", "all_to_all_single"])
def test_operations_with_free_sizes_may_differ(op: str) -> None:
    assert free_sizes(op)
    job = mixed({2: "[7]"})
    for row in job.rows["collectives"]:
        row["op"] = op
    assert mismatch.rule(Evidence(job.collected()), Policy()) == []


def test_another_operation_is_a_mismatch_even_with_free_sizes() -> None:
    job = mixed({})
    job.rows["collectives"][-1]["op"] = "all_to_all"
    assert [f.ranks for f in mismatch.rule(Evidence(job.collected()), Policy())] == [(3,)]


def test_an_insertion_is_an_extra_collective() -> None:
    job = Job(4)
    group = job.group("world", 0, 1, 2, 3)
    for rank in range(4):
        calls = ["[1]", "[2]", "[3]", "[4]", "[5]"]
        if rank == 0:
            calls.insert(1, "[99]")
        for seq, shape in enumerate(calls):
            job.call(rank, group, seq, 10 * seq + rank, 10 * seq + 5, shape=shape)
    found = mismatch.rule(Evidence(job.collected()), Policy())
    assert [(f.cause, f.ranks) for f in found] == [("hang.collective-extra", (0,))]


def test_a_substitution_among_equal_operations_is_no_insertion() -> None:
    job = Job(4)
    group = job.group("world", 0, 1, 2, 3)
    for rank in range(4):
        for seq in range(6):
            shape = "[99]" if (rank, seq) == (3, 2) else "[8]"
            job.call(rank, group, seq, 10 * seq + rank, 10 * seq + 5, shape=shape)
    found = mismatch.rule(Evidence(job.collected()), Policy())
    assert [(f.cause, f.ranks) for f in found] == [("hang.collective-mismatch", (3,))]


def test_fingerprints_of_detail_point_at_the_odd_one_not_at_who_was_blamed_first() -> None:
    def text(one: int, other: int) -> str:
        def body(rank: int) -> str:
            return (
                f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=62, "
                f"OpType=ALLREDUCE, TensorShape=[{4 if rank == 2 else 3}], TensorDtypes=Float, "
                "TensorDeviceTypes=TensorOptions(device=cpu))"
            )

        return (
            "RuntimeError: Detected mismatch between collectives on ranks. "
            f"{body(one)}, but {body(other)}."
        )

    job = Job(4)
    for rank, other in ((0, 2), (1, 2), (2, 0), (3, 2)):
        job.raised(rank, 100 + rank, text(rank, other))
    job.failed()
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks) == ("hang.collective-mismatch", (2,))


def quiet(state: str = "running") -> Job:
    """Ten good steps, then nothing of any rank, and nothing that tells ranks apart."""
    job = ddp(steps=10)
    job.hang(1000, 9000)
    job.run["state"] = state
    job.run["exit_code"] = None if state == "running" else 143
    job.run["ended_ns"] = None if state == "running" else at(12_000)
    return job


@pytest.mark.parametrize("end", ["live", "interrupted", "killed by diag"])
def test_a_hang_without_a_culprit_is_never_healthy(end: str) -> None:
    job = quiet("running" if end == "live" else "finished")
    job.run["interrupted"] = end == "interrupted"
    if end != "live":
        for rank in range(4):
            job.died(rank, 11_900, signal=2 if end == "interrupted" else 15)
    report = diagnose(job.collected())
    assert report.verdict is None and report.health is None
    assert report.abstained is not None
    assert "No rank made progress for 8 s" in report.abstained.because
    assert "py-spy" in report.abstained.need[0]


def paused(**run: object) -> Job:
    """Rank 2 comes to the last barrier long after the hang was seen; no step follows."""
    job = stalled(2, "checkpoint")
    for row in job.rows["phases"] + job.rows["collectives"]:
        if row["end_ns"] is None:
            row["end_ns"] = at(40_000)
            if "state" in row:
                row["state"] = "completed"
    job.call(2, job.group("dp", 0, 1, 2, 3), 20, 39_999, 40_000)
    job.rows["steps"] = [r for r in job.rows["steps"] if r["end_ns"] is not None]
    job.run.update(state="finished", exit_code=0, ended_ns=at(41_000), **run)
    return job


def test_a_long_pause_before_the_end_is_no_hang() -> None:
    report = diagnose(paused().collected())
    assert report.health is not None
    assert [(f.cause, f.role) for f in report.findings] == [("hang.slow-not-dead", "context")]


def test_a_completed_wait_is_progress_while_the_job_still_runs() -> None:
    job = paused()
    job.run.update(state="running", exit_code=None, ended_ns=None)
    assert diagnose(job.collected()).health is not None


def test_what_supervision_says_of_resumption_counts() -> None:
    job = quiet()
    job.run["hangs"][-1]["resumed_ns"] = at(15_000)
    assert diagnose(job.collected()).health is not None


@pytest.mark.parametrize("share", [0.19, 0.0])
def test_a_rank_that_uses_the_processor_is_not_certainly_stuck(share: float) -> None:
    """One long call into a library leaves the stack as it is."""
    job = stalled(2, "forward")
    for row in job.rows["stacks"]:
        row["cpu_share"] = share
    found = verdict(diagnose(job.collected()))
    assert found.ranks == (2,)
    if share:
        assert (found.cause, found.confidence) == ("hang.slow-not-dead", "likely")
        assert "19%" in found.excluded[0][1]
    else:
        assert (found.cause, found.confidence) == ("hang.rank-stalled", "certain")


AGENT = "wrap_wait.<locals>.wait (/opt/lib/collectors/agent/torch_compat.py:160)"


def deadlocked(op: str, *, frames: bool = True, elsewhere: bool = False) -> Job:
    """Ranks 0 and 1 both send (or both receive); ranks 2 and 3 wait for them in a barrier."""
    job = ddp(steps=10)
    group = job.group("dp", 0, 1, 2, 3)
    for rank in (0, 1):
        job.call(rank, group, 3, 960 + rank, op=op, peer=1 - rank)
        for look in range(2 if frames else 0):
            inside = f"{op} (torch/distributed/distributed_c10d.py:3387)"
            out = elsewhere and rank == 1
            job.stack(rank, look, *(("read (/job/data.py:8)",) if out else (AGENT, inside)))
    for rank in (2, 3):
        job.call(rank, group, 20, 970, op="barrier")
    job.hang(1000, 9000)
    job.run.update(state="running", exit_code=None)
    return job


@pytest.mark.parametrize("op", ["send", "recv"])
def test_sends_or_receives_that_do_not_pair_name_both(op: str) -> None:
    report = diagnose(deadlocked(op).collected())
    found = verdict(report)
    assert (found.cause, found.ranks, found.where) == ("hang.collective-mismatch", (0, 1), "p2p")
    assert found.confidence == "likely"
    assert "collectors/agent" not in str(report.as_json())


def test_sends_that_may_have_returned_are_no_deadlock() -> None:
    """Without frames a send may only have been posted: nobody is said to be outside."""
    report = diagnose(deadlocked("send", frames=False).collected())
    assert report.verdict is None and report.health is None


def test_a_rank_that_left_its_send_pending_is_named_where_it_is() -> None:
    found = verdict(diagnose(deadlocked("send", elsewhere=True).collected()))
    assert (found.cause, found.ranks, found.where) == ("hang.rank-stalled", (1,), "data")


def test_frames_of_diag_are_never_the_programs() -> None:
    text = (
        'File "/job/train.py", line 7, in main\n'
        'File "/opt/lib/collectors/agent/hooks.py", line 9, in wrapped\n'
    )
    assert own_frame(text) == "/job/train.py:7 main"
    assert own_frame(text.splitlines()[1]) is None


def test_another_operation_with_nothing_after_it_may_be_an_extra_one() -> None:
    """A barrier of rank 0 alone: no later operation tells extra from mismatch."""
    job = ddp(steps=10)
    group = job.group("dp", 0, 1, 2, 3)
    job.call(0, group, 20, 960, op="barrier", shape=None, dtype=None, bytes_in=0)
    for rank in range(1, 4):
        job.call(rank, group, 20, 961)
    job.hang(1000, 9000)
    job.run.update(state="running", exit_code=None)
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks) == ("hang.collective-mismatch", (0,))
    assert found.confidence == "likely"
    assert "hang.collective-extra" not in dict(found.excluded)


@pytest.mark.parametrize(
    ("odd", "own", "cause"),
    [
        ((0,), ("refresh (cache.py:7)",), "hang.collective-extra"),
        ((0, 4), ("refresh (cache.py:7)",), "hang.collective-extra"),
        ((0, 4), ("step (loop.py:9)",), "hang.collective-mismatch"),
        ((0, 3), ("refresh (cache.py:7)",), "hang.collective-mismatch"),
        ((5,), ("refresh (cache.py:7)",), "hang.collective-mismatch"),
    ],
)
def test_an_operation_from_code_of_a_role_is_one_too_many(
    odd: tuple[int, ...], own: tuple[str, ...], cause: str
) -> None:
    """The first rank, or the first of each node, in code that the others never pass."""
    job = Job(8, loose=True)
    group = job.group("dp", *range(8))
    for frames in (("step (loop.py:9)",), own):
        job.rows["stacks"].append({"rank": 0, "frames": list(frames), "state": "issuing"})
    for rank in range(8):
        for seq in range(6):
            job.call(rank, group, seq, 10.0 * seq, 10.0 * seq + 5, stack_id=0)
        op, stack = ("barrier", 1) if rank in odd else ("all_reduce", 0)
        job.call(rank, group, 6, 70.0, op=op, stack_id=stack)
    (found,) = mismatch.rule(Evidence(job.collected()), Policy())
    assert (found.cause, found.ranks) == (cause, odd)


def test_a_rank_that_ended_well_by_itself_was_not_stuck() -> None:
    """It left while the others still waited for it, seconds before they were killed."""
    job = stalled(2, "other")
    job.died(2, 15_000, exit_code=0)
    for rank in (0, 1, 3):
        job.died(rank, 20_000, signal=15)
    job.run["state"] = "finished"
    job.failed()
    report = diagnose(job.collected())
    assert "hang.rank-stalled" not in {f.cause for f in report.findings}
    assert report.health is None


def test_a_job_interrupted_before_its_first_step_is_no_mystery() -> None:
    job = Job(2)
    for rank in range(2):
        job.died(rank, 3000 + rank, signal=2)
    job.run["interrupted"] = True
    job.failed(130)
    report = diagnose(job.collected())
    assert report.abstained is not None
    assert "interrupted by the user" in report.abstained.because
