"""Out-of-memory causes beyond the message's sum: whose memory, since when, for what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectors.readers import read_paths
from playbooks.engine import diagnose
from playbooks.policy import Policy
from playbooks.rules.memory_growth import grows

if TYPE_CHECKING:
    from pathlib import Path

    from playbooks.report.model import Report


def _report(folder: Path, **files: str) -> Report:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return diagnose(read_paths([str(folder)]))


def _cause(report: Report) -> str | None:
    return None if report.verdict is None else report.verdict.cause


def _oom(
    *frames: str, rank: int = 0, ask: str = "300.00 MiB", own: float = 22.5, others: str = ""
) -> str:
    """A traceback of torch 2 on a device of 24 GiB; frames outermost first."""
    lines = ["Traceback (most recent call last):"]
    for name in frames:
        lines += [f'  File "/job/train.py", line 7, in {name}', "    run()"]
    lines.append(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {ask}. GPU {rank} has a "
        f"total capacity of 23.50 GiB of which 20.00 MiB is free. {others}Including non-PyTorch "
        f"memory, this process has {own + 0.4:.2f} GiB memory in use. Of the allocated memory "
        f"{own:.2f} GiB is allocated by PyTorch, and 30.00 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting X"
    )
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def _steps(rank: int, count: int, start: float = 10.0, slope: float = 0.0) -> str:
    return "".join(
        f"[rank{rank}]: 2025-04-02 10:{n // 6:02d}:{n % 6 * 10:02d} step {n} loss 2.1 "
        f"allocated {start + n * slope:.2f} GiB\n"
        for n in range(count)
    )


def test_a_stranger_on_the_device(tmp_path: Path) -> None:
    pids = "".join(f"[rank{r}]: rank {r} pid {70 + r}\n" for r in range(2))
    text = pids + _oom("main", "to", own=3.0, others="Process 4242 has 19.80 GiB memory in use. ")
    report = _report(tmp_path, job__log=text)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("oom.other-process", (0,))


def test_ranks_of_the_job_on_the_device_are_no_strangers(tmp_path: Path) -> None:
    pids = "".join(f"[rank{r}]: rank {r} pid {70 + r}\n" for r in range(4))
    others = "".join(f"Process {70 + r} has 5.00 GiB memory in use. " for r in (1, 2, 3))
    report = _report(tmp_path, job__log=pids + _oom("main", "barrier", own=7.0, others=others))
    assert _cause(report) == "oom.all-ranks-gpu0"


def test_a_small_context_of_another_process_is_no_reason(tmp_path: Path) -> None:
    text = _oom("main", "forward", others="Process 4242 has 0.40 GiB memory in use. ")
    assert _cause(_report(tmp_path, job__log=text)) != "oom.other-process"


def test_memory_that_rises_with_every_step_is_a_kept_graph(tmp_path: Path) -> None:
    text = _steps(0, 40, slope=0.3) + _steps(1, 40) + _oom("main", "forward")
    report = _report(tmp_path, job__log=text)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("oom.retained-graph", (0,))


def test_flat_memory_is_no_kept_graph(tmp_path: Path) -> None:
    text = _steps(0, 40) + _oom("main", "forward")
    assert _cause(_report(tmp_path, job__log=text)) != "oom.retained-graph"


def test_jumps_and_warm_up_are_no_growth() -> None:
    gib = 2**30
    assert grows([gib * n for n in range(10, 22)], Policy())
    assert not grows([10 * gib] * 6 + [20 * gib] * 6, Policy())
    assert not grows([gib * n for n in (5, 9, 11, 12, 12, 12, 12, 12, 12, 12)], Policy())
    assert not grows([gib, 2 * gib, 3 * gib], Policy())
    assert not grows([], Policy())


def test_a_gathered_state_dict_after_steps_that_fit(tmp_path: Path) -> None:
    text = _steps(0, 20) + _oom("main", "save_checkpoint", "get_model_state_dict", "full_tensor")
    assert _cause(_report(tmp_path, job__log=text)) == "oom.full-state-dict"


def test_a_forward_that_runs_out_is_no_state_dict(tmp_path: Path) -> None:
    text = _steps(0, 20) + _oom("main", "train_step", "forward")
    assert _cause(_report(tmp_path, job__log=text)) != "oom.full-state-dict"


_SIZES = "[rank0]: micro_batch_size 2, sequence length 4096, vocab size 100000\n"


def test_a_request_of_the_size_of_the_logits(tmp_path: Path) -> None:
    # 2 * 4096 * 100000 * 4 B = 3.05 GiB
    text = _SIZES + _oom("main", "loss_fn", ask="3.05 GiB", own=21.0)
    assert _cause(_report(tmp_path, job__log=text)) == "oom.logits"


def test_another_size_or_unknown_sizes_are_no_logits(tmp_path: Path) -> None:
    text = _SIZES + _oom("main", "loss_fn", ask="2.50 GiB", own=21.0)
    assert _cause(_report(tmp_path, job__log=text)) != "oom.logits"
    text = _oom("main", "loss_fn", ask="3.05 GiB", own=21.0)
    assert _cause(_report(tmp_path, job__log=text)) != "oom.logits"


def test_optimizer_states_that_do_not_fit_in_the_first_step(tmp_path: Path) -> None:
    text = _oom("main", "step", "_init_group")
    assert _cause(_report(tmp_path, job__log=text)) == "oom.model-states"
    text = _steps(0, 20) + text
    assert _cause(_report(tmp_path, job__log=text)) != "oom.model-states"


def test_evaluation_after_steps_that_fit(tmp_path: Path) -> None:
    text = _oom("main", "evaluation_loop", "forward")
    assert _cause(_report(tmp_path, job__log=_steps(0, 20) + text)) == "oom.evaluation"
    assert _cause(_report(tmp_path, job__log=text)) != "oom.evaluation"


def test_nccl_without_memory_while_torch_raised_nothing(tmp_path: Path) -> None:
    warn = "n1:70:90 [0] include/alloc.h:99 NCCL WARN Cuda failure 2 'out of memory'\n"
    assert _cause(_report(tmp_path, job__log=warn)) == "oom.comm-buffers"
    other = "n1:70:90 [0] include/alloc.h:99 NCCL WARN Cuda failure 700 'illegal memory access'\n"
    assert _cause(_report(tmp_path, job__log=other)) != "oom.comm-buffers"


def test_a_killed_pod_is_host_memory_and_a_kill_of_a_stranger_is_not(tmp_path: Path) -> None:
    state = "job-worker-1  0/1  OOMKilled  0  12m\n"
    report = _report(tmp_path, pods__txt=state, job__log=_steps(0, 20))
    assert _cause(report) == "oom.host"
    (tmp_path / "pods.txt").unlink()
    kernel = (
        "Apr  2 10:02:00 n1 kernel: Out of memory: Killed process 9 (mysqld) total-vm:9kB, "
        "anon-rss:9kB, file-rss:0kB\n"
    )
    assert _cause(_report(tmp_path, kern__log=kernel)) != "oom.host"


def test_a_buffer_that_could_not_be_pinned_is_no_device_memory(tmp_path: Path) -> None:
    text = "".join(
        f"[rank0]: {line}\n"
        for line in (
            "Traceback (most recent call last):",
            '  File "/job/train.py", line 9, in build',
            '  File "/lib/offload.py", line 4, in pin_memory',
            "RuntimeError: CUDA error: out of memory",
        )
    )
    assert _cause(_report(tmp_path, job__log=text)) == "oom.pinned-host"
    assert _cause(_report(tmp_path, job__log=text.replace("pin_memory", "run"))) is None


def test_memory_beside_the_allocator_is_that_of_communicators(tmp_path: Path) -> None:
    def told(outside: float) -> str:
        return _oom("main", "train_step", own=20.0).replace(
            "this process has 20.40 GiB", f"this process has {20.4 + outside:.2f} GiB"
        )

    report = _report(tmp_path, job__log=told(9.0))
    assert _cause(report) == "oom.comm-buffers"
    assert report.verdict is not None
    assert "in use" in (report.verdict.formula or "")
    assert _cause(_report(tmp_path, job__log=told(2.0))) != "oom.comm-buffers"


def test_contexts_of_the_jobs_own_ranks_on_one_device(tmp_path: Path) -> None:
    pids = "".join(f"[rank{r}]: rank {r} pid {70 + r}\n" for r in range(4))
    others = "".join(f"Process {70 + r} has 520.00 MiB memory in use. " for r in range(1, 4))
    text = pids + _oom("main", "backward", own=20.0, others=others)
    assert _cause(_report(tmp_path, job__log=text)) == "oom.all-ranks-gpu0"


def test_a_stage_with_more_of_the_model_fails_alone(tmp_path: Path) -> None:
    def sizes(first: int) -> str:
        counts = [first, first, 30, 30, 30, 31]
        return "".join(f"[rank{r}]: {n}00,000,000 parameters\n" for r, n in enumerate(counts))

    oom = _oom("main", "step", "_init_group") + _oom("main", "step", "_init_group", rank=1)
    report = _report(tmp_path, job__log=sizes(54) + oom)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("oom.stage-imbalance", (0, 1))
    assert _cause(_report(tmp_path, job__log=sizes(31) + oom)) != "oom.stage-imbalance"


def test_peaks_that_fall_from_stage_to_stage_are_microbatches_in_flight(tmp_path: Path) -> None:
    def peaks(*gigabytes: float) -> str:
        return "".join(
            f"[Rank {r}] (after 1 iterations) memory (MB) | allocated: 5000.0 | max allocated: "
            f"{one * 1024:.1f} | reserved: 9000.0 | max reserved: 9000.0\n"
            for r, one in enumerate(gigabytes)
        )

    oom = _oom("main", "train_step", "forward")
    report = _report(tmp_path, job__log=peaks(22.0, 18.0, 14.0, 10.0) + oom)
    assert report.verdict is not None
    assert (report.verdict.cause, report.verdict.ranks) == ("oom.pipeline-inflight", (0,))
    for alike in ((22.0, 21.9, 22.0, 21.8), (22.0, 10.0, 21.0, 9.0)):
        assert _cause(_report(tmp_path, job__log=peaks(*alike) + oom)) != "oom.pipeline-inflight"
