"""Rules that read logs, kernel lines and stacks: the kind decides, and a near miss stays unsaid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from collectors.readers import read_paths
from playbooks.engine import diagnose

if TYPE_CHECKING:
    from pathlib import Path

    from playbooks.report.model import Report


def _report(folder: Path, **files: str) -> Report:
    """The report on files; `__` in a name stands for a dot."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return diagnose(read_paths([str(folder)]))


def _cause(report: Report) -> str | None:
    return None if report.verdict is None else report.verdict.cause


def _timeout(
    rank: int, clock: str, *, seq: int = 88, op: str = "ALLREDUCE", size: int = 4096
) -> str:
    return (
        f"[rank{rank}]:[E0402 {clock}.125000000 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, "
        f"NumelOut={size}, Timeout(ms)=300000) ran for 300020 milliseconds before timing out.\n"
    )


def _steps(rank: int, last: int, *, first: int = 1, minute: int = 0) -> str:
    return "".join(
        f"[rank{rank}]: 2025-04-02 10:{minute + n // 6:02d}:{n % 6 * 10:02d} step {n} loss "
        f"2.{n:02d}\n"
        for n in range(first, last + 1)
    )


# --- hang.slow-not-dead ---------------------------------------------------------------------


def _counting(until_minute: int, *, rise: int = 500) -> str:
    text = "".join(_steps(r, 6) for r in range(4))
    for n in range(until_minute):
        done = 1000 + n * rise
        text += f"[rank2]: 2025-04-02 10:{2 + n:02d}:00 tokenizing corpus: {done} / 90000 lines\n"
    return text + "".join(_timeout(r, "10:07:10") for r in (0, 1, 3))


def test_a_rank_that_counts_on_while_others_wait_is_slow(tmp_path: Path) -> None:
    report = _report(tmp_path, job__log=_counting(6))
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("hang.slow-not-dead", (2,))
    assert report.verdict.where == "data"


def test_a_counter_that_stands_still_is_not_slow(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, job__log=_counting(6, rise=0))) != "hang.slow-not-dead"


def test_a_counter_that_stopped_long_before_the_timeout_is_not_slow(tmp_path: Path) -> None:
    text = _counting(3).replace("10:02:00", "10:02:10").replace("10:03:00", "10:02:12")
    text = text.replace("10:04:00", "10:02:14")
    assert _cause(_report(tmp_path, job__log=text)) != "hang.slow-not-dead"


def test_timeouts_alone_name_nobody(tmp_path: Path) -> None:
    text = "".join(_timeout(r, "10:07:10") for r in (0, 1, 3))
    assert _report(tmp_path, job__log=text).verdict is None


# --- hang.uneven-inputs ---------------------------------------------------------------------


def _epoch(late_step: int) -> str:
    text = "".join(_steps(r, 12) for r in range(4))
    text += "".join(f"[rank{r}]: epoch 2 finished, 12 batches\n" for r in (0, 1))
    text += "".join(_steps(r, late_step, first=late_step) for r in (2, 3))
    text += "".join(_timeout(r, "10:09:10", op="BROADCAST", size=1) for r in (0, 1))
    return text + "".join(_timeout(r, "10:09:11") for r in (2, 3))


def test_ranks_in_a_batch_that_others_do_not_have_are_uneven(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, job__log=_epoch(13))) == "hang.uneven-inputs"


def test_ranks_in_the_last_common_batch_are_not_uneven(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, job__log=_epoch(12))) != "hang.uneven-inputs"


def test_one_rank_that_logs_steps_tells_nothing_of_uneven_inputs(tmp_path: Path) -> None:
    text = _steps(0, 12) + "[rank0]: epoch 2 finished, 12 batches\n" + _timeout(0, "10:09:10")
    assert _report(tmp_path, job__log=text).verdict is None


# --- hang.exception-swallowed ---------------------------------------------------------------


def _caught(*ranks: int, then_steps: bool = False) -> str:
    text = "".join(_steps(r, 6) for r in range(4))
    for rank in ranks:
        text += (
            f"[rank{rank}]: 2025-04-02 10:01:08 WARNING decode error in sample 77, skipping it\n"
        )
    if then_steps:
        text += "".join(_steps(r, 12, first=7) for r in range(4))
    text += "".join(_timeout(r, "10:07:10") for r in (0, 2, 3))
    return text + _timeout(1, "10:07:11", op="ALLGATHER", size=64)


def test_an_error_that_one_rank_caught_before_the_wait_is_swallowed(tmp_path: Path) -> None:
    report = _report(tmp_path, job__log=_caught(1))
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("hang.exception-swallowed", (1,))


def test_an_error_that_all_ranks_caught_is_not_swallowed(tmp_path: Path) -> None:
    assert _cause(_report(tmp_path, job__log=_caught(0, 1, 2, 3))) != "hang.exception-swallowed"


def test_an_error_after_which_the_job_went_on_is_not_swallowed(tmp_path: Path) -> None:
    report = _report(tmp_path, job__log=_caught(1, then_steps=True))
    assert _cause(report) != "hang.exception-swallowed"


# --- hang.gil-held, hang.rank-stalled from stacks -------------------------------------------

_HOLDER = """Process 77: python train.py
Python v3.12.1 (/usr/bin/python3.12)

Thread 77 (active+gil): "MainThread"
    parse_block (libfastjson.so)
    read (loader.py:20)
Thread 80 (idle): "monitor"
    take_gil (python3.12)
    tick (health.py:9)
"""


def test_native_code_that_holds_the_lock_of_an_awaited_rank(tmp_path: Path) -> None:
    text = "".join(_steps(r, 6) for r in range(4)) + "".join(
        _timeout(r, "10:07:10") for r in (0, 1, 2)
    )
    report = _report(tmp_path, job__log=text, pyspy_rank3__txt=_HOLDER)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("hang.gil-held", (3,))


def test_a_python_thread_that_holds_the_lock_is_no_native_holder(tmp_path: Path) -> None:
    text = "".join(_steps(r, 6) for r in range(4)) + "".join(
        _timeout(r, "10:07:10") for r in (0, 1, 2)
    )
    stacks = _HOLDER.replace("    parse_block (libfastjson.so)\n", "")
    report = _report(tmp_path, job__log=text, pyspy_rank3__txt=stacks)
    assert report.verdict is not None
    assert report.verdict.cause == "hang.rank-stalled"


def test_a_monitor_line_alone_is_not_enough_for_the_lock(tmp_path: Path) -> None:
    line = (
        "[rank3]:[E0402 10:07:10.1 P.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 3] Could not "
        "acquire GIL within 300 ms on exit, possible GIL induced hang\n"
    )
    assert _report(tmp_path, job__log=line).verdict is None


def _look(frame: str, rank: int, clock: str) -> str:
    return f"""$ date; py-spy dump --pid {500 + rank}  # rank {rank}
Wed Apr  2 {clock} UTC 2025
Process {500 + rank}: python train.py
Python v3.12.1 (/usr/bin/python3.12)

Thread {500 + rank} (idle): "MainThread"
    {frame}
    step (train.py:50)

"""


_BARRIER = "barrier (torch/distributed/distributed_c10d.py:4100)"


def test_two_equal_looks_outside_a_collective_are_a_stall_and_two_different_ones_are_not(
    tmp_path: Path,
) -> None:
    waits = _look(_BARRIER, 0, "10:00:00") + _look(_BARRIER, 1, "10:00:00")
    stuck = _look("read (shards.py:7)", 2, "10:00:00") + _look("read (shards.py:7)", 2, "10:01:00")
    report = _report(tmp_path, stacks__txt=waits + stuck)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("hang.rank-stalled", (2,))
    moving = stuck.replace("shards.py:7", "index.py:9", 1)
    report = _report(tmp_path, stacks__txt=waits + moving)
    assert _cause(report) == "hang.slow-not-dead"


def test_ranks_that_all_sit_in_the_barrier_are_no_stall(tmp_path: Path) -> None:
    waits = "".join(_look(_BARRIER, r, "10:00:00") for r in range(3))
    assert _report(tmp_path, stacks__txt=waits).verdict is None


# --- hang.device-error ----------------------------------------------------------------------


def _device(xid: int, clock: str) -> tuple[str, str]:
    log = "".join(
        f"[rank{r}]: n7:{900 + r}:{950 + r} [{r}] NCCL INFO comm 0x1 rank {r} nranks 4 cudaDev {r} "
        f"busId {0x11 + r:x}000 - Init COMPLETE\n"
        for r in range(4)
    )
    log += "".join(_steps(r, 6) for r in range(4)) + _timeout(0, "10:07:10")
    kernel = (
        f"2025-04-02T{clock}+00:00 n7 kernel: NVRM: Xid (PCI:0000:13:00): {xid}, pid=902, text\n"
    )
    return log, kernel


def test_a_hardware_xid_before_the_first_failure_names_the_rank_on_that_bus(tmp_path: Path) -> None:
    log, kernel = _device(79, "10:01:30.000000")
    report = _report(tmp_path, job__log=log, kern__log=kernel)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("hang.device-error", (2,))
    assert report.verdict.where == "off-bus"


@pytest.mark.parametrize(
    ("xid", "clock"),
    [(43, "10:01:30.000000"), (31, "10:01:30.000000"), (79, "10:20:00.000000")],
)
def test_software_xids_and_later_ones_are_no_device_error(
    tmp_path: Path, xid: int, clock: str
) -> None:
    log, kernel = _device(xid, clock)
    assert _cause(_report(tmp_path, job__log=log, kern__log=kernel)) != "hang.device-error"


# --- crash.scheduler-ended, crash.node-lost -------------------------------------------------


def _cancelled(clock: str) -> str:
    return (
        _steps(0, 30)
        + f"slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2025-04-02T{clock} DUE TO TIME "
        "LIMIT ***\n"
    )


def test_a_job_whose_steps_went_on_was_ended_by_its_scheduler(tmp_path: Path) -> None:
    report = _report(tmp_path, slurm__out=_cancelled("10:05:05"))
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.where) == ("crash.scheduler-ended", "time-limit")


def test_a_job_that_stood_still_before_its_time_limit_was_not(tmp_path: Path) -> None:
    assert _report(tmp_path, slurm__out=_cancelled("12:00:00")).verdict is None


def test_a_failed_job_that_is_cancelled_was_not_ended_by_its_scheduler(tmp_path: Path) -> None:
    text = _cancelled("10:05:30") + _timeout(0, "10:05:10")
    assert _cause(_report(tmp_path, slurm__out=text)) != "crash.scheduler-ended"


def test_a_node_that_failed_while_all_its_ranks_fell_silent_is_lost(tmp_path: Path) -> None:
    errors = "".join(
        f"[rank{r}]:[E0402 10:03:40.1 P.cpp:1] [Rank {r}] NCCL watchdog thread terminated with "
        "exception: NCCL error: remote process exited or there was a network error\n"
        for r in (0, 1)
    )
    one = _steps(0, 12) + _steps(1, 12) + errors + "slurmstepd: error: Node failure on n2\n"
    two = _steps(2, 10) + _steps(3, 10)
    report = _report(tmp_path, n1__log=one, n2__log=two)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("crash.node-lost", (2, 3))


def test_silence_without_a_record_of_the_node_is_no_lost_node(tmp_path: Path) -> None:
    one = _steps(0, 12) + _steps(1, 12) + _timeout(0, "10:07:10") + _timeout(1, "10:07:10")
    report = _report(tmp_path, n1__log=one, n2__log=_steps(2, 10) + _steps(3, 10))
    assert report.verdict is None


# --- health ---------------------------------------------------------------------------------


def test_a_recorded_success_with_caught_errors_is_health(tmp_path: Path) -> None:
    text = "[rank0]: 2025-04-02 10:00:00 caught an out of memory error, retrying with 16\n"
    report = _report(tmp_path, job__log=text + _steps(0, 30), end__txt="n1: torchrun exited 0\n")
    assert report.health is not None


def test_a_recorded_failure_is_no_health(tmp_path: Path) -> None:
    report = _report(tmp_path, job__log=_steps(0, 30), end__txt="n1: torchrun exited 1\n")
    assert report.health is None


# --- hang.transport -------------------------------------------------------------------------


def test_all_ranks_of_a_known_world_in_one_operation_may_be_the_transport(tmp_path: Path) -> None:
    text = "world_size: 3\n" + "".join(_timeout(r, "10:07:10") for r in range(3))
    report = _report(tmp_path, job__log=text)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.confidence) == ("hang.transport", "possible")


def test_a_world_of_which_ranks_are_missing_or_differ_is_no_transport(tmp_path: Path) -> None:
    text = "world_size: 4\n" + "".join(_timeout(r, "10:07:10") for r in range(3))
    assert _report(tmp_path, job__log=text).verdict is None
    text += _timeout(3, "10:07:10", size=8)
    assert _cause(_report(tmp_path, job__log=text)) != "hang.transport"


def test_a_job_cancelled_for_its_node_is_a_lost_node_and_not_a_cancel(tmp_path: Path) -> None:
    text = _cancelled("10:05:05").replace("TIME LIMIT", "NODE FAILURE, SEE LOG FOR DETAILS")
    assert _cause(_report(tmp_path, slurm__out=text)) == "crash.node-lost"


def test_a_killed_data_worker_alone_does_not_say_why(tmp_path: Path) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 7, in main',
        "RuntimeError: DataLoader worker (pid 777) is killed by signal: Killed. ",
    )
    text = _steps(1, 6) + "".join(f"[rank1]: {line}\n" for line in lines)
    assert _report(tmp_path, job__log=text).verdict is None
    kernel = (
        "[Wed Apr  2 10:00:50 2025] Memory cgroup out of memory: Killed process 777 (python) "
        "total-vm:9kB, anon-rss:9kB, file-rss:0kB\n"
    )
    report = _report(tmp_path, job__log=text, kern__log=kernel)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("oom.host", (1,))
