"""Processes that ended: deaths, exceptions, out-of-memory errors, and what is only their echo."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from playbooks_jobs import GLOO_CLOSED, Job, at, ddp

from playbooks.engine import diagnose
from playbooks.evidence import Evidence
from playbooks.policy import Policy
from playbooks.rules import death, memory
from playbooks.rules.common import own_frame

if TYPE_CHECKING:
    from playbooks.finding import Finding
    from playbooks.report.model import Report

TRACE = """Traceback (most recent call last):
  File "/job/train.py", line 88, in main
    train(batch)
  File "/job/model.py", line 12, in forward
    return table[key]
"""
C10D = """Traceback (most recent call last):
  File "/job/train.py", line 90, in main
    dist.all_reduce(x)
  File "/env/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 2501, in all_reduce
    work.wait()
"""


def verdict(report: Report) -> Finding:
    assert report.verdict is not None, report.abstained or report.health
    return report.verdict


def dead(culprit: int = 2, signal: int = 9) -> Job:
    """`culprit` is killed in step 10; the others lose it within a second."""
    job = ddp(steps=10)
    for rank in range(4):
        job.step(rank, 10, 950, None)
        job.phase(rank, 10, "backward", 960, None)
    job.died(culprit, 1000, signal=signal)
    others = [r for r in range(4) if r != culprit]
    job.raised(others[0], 980, GLOO_CLOSED, C10D)
    job.raised(others[1], 1010, GLOO_CLOSED, C10D)
    job.died(others[2], 1100, signal=15)
    job.failed()
    return job


def sample(job: Job, ms: float, used: int, kills: int | None = None) -> None:
    job.rows["hosts"].append(
        {
            "host": "node0",
            "time_ns": at(ms),
            "memory_used": used,
            "memory_total": 100 << 30,
            "oom_kills": kills,
        }
    )


@pytest.mark.parametrize("culprit", range(4))
def test_a_killed_rank_explains_its_peers(culprit: int) -> None:
    report = diagnose(dead(culprit).collected())
    found = verdict(report)
    assert (found.cause, found.ranks, found.confidence) == (
        "hang.rank-died",
        (culprit,),
        "certain",
    )
    assert "SIGKILL in backward of step 10" in found.summary
    assert not any("timeout" in a.lower() for a in found.advice)
    roots = [f for f in report.findings if f.role == "root"]
    assert roots == [found]
    assert {f.caused_by for f in report.findings if f.role == "effect"} == {"hang.rank-died"}


def test_escalation_of_the_launcher_is_no_second_death() -> None:
    job = dead()
    job.died(3, 31_000, signal=9)
    assert verdict(diagnose(job.collected())).ranks == (2,)


def test_sigterm_and_sigabrt_alone_are_no_root() -> None:
    job = ddp(steps=5)
    job.died(0, 500, signal=15)
    job.died(1, 500, signal=6)
    job.failed()
    report = diagnose(job.collected())
    assert report.verdict is None
    assert report.abstained is not None
    assert "stderr" in report.abstained.need[0]


def test_a_memory_record_makes_it_host_memory() -> None:
    job = dead()
    sample(job, 100, 10 << 30, kills=4)
    sample(job, 1500, 10 << 30, kills=5)
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks, found.confidence) == ("oom.host", (2,), "certain")


def test_a_full_host_just_before_makes_memory_likely() -> None:
    job = dead()
    sample(job, 900, 99 << 30)
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.confidence) == ("oom.host", "likely")


def test_memory_with_room_excludes_the_oom_killer() -> None:
    job = dead()
    sample(job, 900, 20 << 30, kills=3)
    sample(job, 990, 20 << 30, kills=3)
    found = verdict(diagnose(job.collected()))
    assert found.cause == "hang.rank-died"
    assert found.excluded[0][0] == "oom.host"


def test_a_kernel_line_with_its_pid_makes_it_host_memory() -> None:
    job = dead()
    job.rows["log_events"].append(
        {
            "kind": "kernel.oom-killed",
            "source": "nodes/node0/kernel.log",
            "locator": "line 9",
            "fields": json.dumps({"pid": 1002}),
            "quote": "Out of memory: Killed process 1002 (python)",
        }
    )
    assert verdict(diagnose(job.collected())).cause == "oom.host"
    job.rows["log_events"][0]["fields"] = json.dumps({"pid": 77})
    assert verdict(diagnose(job.collected())).cause == "hang.rank-died"


@pytest.mark.parametrize(("signal", "name"), [(11, "SIGSEGV"), (4, "SIGILL"), (8, "SIGFPE")])
def test_a_fault_signal_is_a_native_fault(signal: int, name: str) -> None:
    found = verdict(diagnose(dead(1, signal).collected()))
    assert (found.cause, found.ranks) == ("crash.native-fault", (1,))
    assert name in found.summary


def test_an_unknown_end_with_an_open_log_is_likely_when_peers_lost_it() -> None:
    job = dead()
    job.rank(2, signal=None, closed=False)
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks, found.confidence) == ("hang.rank-died", (2,), "likely")


def test_a_silent_exit_0_is_a_death_only_where_peers_still_wait_for_it() -> None:
    job = ddp(2, steps=5)
    group = job.group("dp", 0, 1)
    job.call(0, group, 10, 480, 490, state="failed")
    job.died(1, 485, exit_code=0)
    job.rank(1, closed=False)
    job.raised(0, 490, GLOO_CLOSED, C10D)
    job.failed()
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks, found.confidence) == ("hang.rank-died", (1,), "likely")
    job.rank(1, closed=True)
    assert diagnose(job.collected()).verdict is None


def test_an_interrupt_is_no_fault() -> None:
    job = ddp(steps=12)
    for rank in range(4):
        job.died(rank, 1200 + rank, signal=2)
    job.run.update(interrupted=True, exit_code=130, ended_ns=at(1400))
    report = diagnose(job.collected())
    assert report.health is not None
    assert "interrupted" in report.health.summary
    assert report.health.numbers["steps"] == 12


def test_kills_that_follow_an_interrupt_are_no_death() -> None:
    job = ddp(steps=12)
    job.died(0, 1200, signal=2)
    job.died(1, 1300, signal=9)
    job.died(2, 31_000, signal=9)
    job.run.update(interrupted=True, exit_code=130, ended_ns=at(32_000))
    assert diagnose(job.collected()).verdict is None


def test_a_death_long_before_the_interrupt_stands() -> None:
    job = ddp(steps=12)
    job.died(1, 1300, signal=9)
    for rank in (0, 2, 3):
        job.died(rank, 90_000, signal=2)
    job.run.update(interrupted=True, exit_code=130, ended_ns=at(90_100))
    assert verdict(diagnose(job.collected())).ranks == (1,)


def test_the_earliest_real_exception_wins_over_errors_of_peers() -> None:
    job = ddp(steps=5)
    job.raised(0, 490, GLOO_CLOSED, C10D)
    job.raised(3, 500, "KeyError: 'tokens'", TRACE)
    job.died(1, 600, signal=15)
    job.failed()
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks, found.confidence) == ("crash.user-exception", (3,), "certain")
    assert "/job/model.py:12 forward" in found.summary


def test_the_same_exception_everywhere_names_all() -> None:
    job = ddp(steps=5)
    for rank in range(4):
        job.raised(rank, 500 + rank, "ValueError: bad config", TRACE)
    job.failed()
    assert verdict(diagnose(job.collected())).ranks == (0, 1, 2, 3)


def test_a_later_exception_is_an_effect_of_the_first() -> None:
    job = ddp(steps=5)
    job.raised(1, 500, "ValueError: first", TRACE)
    job.raised(2, 900, "ZeroDivisionError: second", TRACE)
    job.failed()
    report = diagnose(job.collected())
    assert verdict(report).ranks == (1,)
    assert any("second" in f.summary for f in report.findings if f.role == "effect")


def test_only_peer_errors_abstain() -> None:
    job = ddp(steps=5)
    job.raised(1, 500, GLOO_CLOSED, C10D)
    job.failed()
    report = diagnose(job.collected())
    assert report.verdict is None and report.abstained is not None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("OSError: [Errno 28] No space left on device: '/ckpt/x'", "crash.storage-failed"),
        ("RuntimeError: CUDA error: device-side assert triggered", "crash.kernel-error"),
        ("OSError: [Errno 24] Too many open files", "config.os-limits"),
    ],
)
def test_errors_that_say_their_cause(text: str, cause: str) -> None:
    job = ddp(steps=5)
    job.raised(0, 500, text, TRACE)
    job.failed()
    assert verdict(diagnose(job.collected())).cause == cause


CPU_OOM = (
    "builtins.RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "
    "can't allocate memory: you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {request}. GPU 0 has a total "
    "capacity of 79.15 GiB of which {free} is free. Including non-PyTorch memory, this process has "
    "78.0 GiB memory in use. Of the allocated memory {allocated} is allocated by PyTorch, and "
    "{idle} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def out_of_memory(text: str, rank: int = 2) -> Job:
    job = ddp(steps=5)
    job.raised(rank, 500, text, TRACE)
    job.raised((rank + 1) % 4, 520, GLOO_CLOSED, C10D)
    job.failed()
    return job


def test_more_than_the_host_has_is_oversized() -> None:
    job = out_of_memory(CPU_OOM.format(200 << 30))
    sample(job, 100, 10 << 30)
    found = verdict(diagnose(job.collected()))
    assert (found.cause, found.ranks, found.confidence) == (
        "oom.oversized-request",
        (2,),
        "certain",
    )
    assert found.formula == "request 200.0 GiB > total 100.0 GiB"


def test_an_absurd_size_needs_no_knowledge_of_the_host() -> None:
    found = verdict(diagnose(out_of_memory(CPU_OOM.format(1 << 50)).collected()))
    assert (found.cause, found.confidence) == ("oom.oversized-request", "likely")


def test_a_plausible_host_request_abstains_and_asks() -> None:
    report = diagnose(out_of_memory(CPU_OOM.format(8 << 30)).collected())
    assert report.verdict is None
    assert report.abstained is not None
    assert "memory_summary" in report.abstained.need[0]


def cuda(request: str, free: str, allocated: str, idle: str) -> Job:
    return out_of_memory(
        CUDA_OOM.format(request=request, free=free, allocated=allocated, idle=idle)
    )


@pytest.mark.parametrize(
    ("sizes", "cause", "confidence"),
    [
        (("90.00 GiB", "1.00 GiB", "70.00 GiB", "1.00 GiB"), "oom.oversized-request", "certain"),
        (("2.00 GiB", "500.00 MiB", "60.00 GiB", "17.00 GiB"), "oom.fragmentation", "likely"),
        (("1.00 GiB", "40.00 GiB", "30.00 GiB", "200.00 MiB"), "oom.artificial-limit", "likely"),
        (("1.00 GiB", "100.00 MiB", "77.00 GiB", "200.00 MiB"), "oom.activations", "possible"),
    ],
)
def test_the_sum_in_a_device_message(
    sizes: tuple[str, str, str, str], cause: str, confidence: str
) -> None:
    found = verdict(diagnose(cuda(*sizes).collected()))
    assert (found.cause, found.confidence, found.ranks) == (cause, confidence, (2,))


def test_a_full_device_without_a_frame_abstains() -> None:
    job = cuda("1.00 GiB", "100.00 MiB", "77.00 GiB", "200.00 MiB")
    job.rank(2, traceback="")
    assert diagnose(job.collected()).abstained is not None


def test_old_messages_read_alike() -> None:
    found = memory.parse(
        "CUDA out of memory. Tried to allocate 98.00 MiB (GPU 0; 23.69 GiB total capacity; 20.00 "
        "GiB already allocated; 61.00 MiB free; 23.00 GiB reserved in total by PyTorch)"
    )
    assert found.request == 98 << 20
    assert found.free == 61 << 20
    assert found.idle == 3 << 30


def test_no_ends_no_findings() -> None:
    assert death.rule(Evidence(ddp().collected()), Policy()) == []


def test_the_programs_own_frame_is_quoted_not_the_librarys() -> None:
    assert own_frame(C10D) == "/job/train.py:90 main"


def _restarted(*, finished: bool) -> Job:
    """Attempt 0 fell to an exception of rank 2, as the log says; attempt 1 ran."""
    job = ddp()
    for rank in range(4):
        job.rank(rank, attempt=1, exit_code=0 if finished else 1)
    fields = {"type": "ValueError", "message": "only once", "frames": ["/job/train.py:7 main"]}
    job.rows["log_events"].append(
        {
            "time_ns": at(-5000),
            "rank": 2,
            "source": "job.stderr",
            "locator": "line 5",
            "kind": "python.exception",
            "fields": json.dumps(fields),
            "quote": "ValueError: only once",
        }
    )
    if not finished:
        job.failed()
    return job


def test_what_a_restart_overcame_is_context_of_a_healthy_job() -> None:
    report = diagnose(_restarted(finished=True).collected())
    assert report.verdict is None
    assert report.health is not None
    assert "attempt 2" in report.health.summary
    assert [(f.cause, f.role) for f in report.findings] == [("crash.user-exception", "context")]
    assert verdict(diagnose(_restarted(finished=False).collected())).cause == "crash.user-exception"


WORKER = """OSError: Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/site-packages/torch/utils/data/_utils/worker.py", line 375, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/job/data.py", line 6, in __getitem__
    raise OSError("truncated shard 17")
OSError: truncated shard 17
in /data/17
"""


def test_the_error_of_a_data_worker_is_named_and_not_its_traceback() -> None:
    job = ddp(steps=5)
    job.raised(1, 700, WORKER)
    job.failed()
    report = diagnose(job.collected())
    assert report.verdict is not None
    assert "raised OSError: truncated shard 17 in /data/17 (in DataLoader worker process 0)" in (
        report.verdict.summary
    )


def test_an_abstention_names_what_the_rank_raised() -> None:
    job = ddp(steps=5)
    job.raised(1, 700, GLOO_CLOSED)
    job.failed()
    report = diagnose(job.collected())
    assert report.abstained is not None
    assert "rank 1 ended with exit code 1" in report.abstained.because.lower()
    assert "Connection closed by peer" in report.abstained.because
