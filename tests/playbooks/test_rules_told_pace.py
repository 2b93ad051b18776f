"""What sets the pace, told by logs in many forms: each form once sick, once with ordinary noise."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from collectors.readers import read_paths
from playbooks.engine import diagnose

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Form = tuple[str, "list[int] | None", "Callable[[bool], dict[str, str]]"]


def ask(tmp_path: Path, files: dict[str, str]) -> dict[str, Any]:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return diagnose(read_paths([str(tmp_path)])).as_json()


def noise(value: float, seed: int) -> float:
    return value * (1 + random.Random(seed).uniform(-0.02, 0.02))


def ranks_json(sick: bool) -> dict[str, str]:
    rows = [
        {
            "step": s,
            "rank": r,
            "data_ms": round(noise(3, s * 8 + r), 2),
            "fwd_ms": round(noise(150, s * 8 + r) * (1.4 if sick and r == 5 else 1), 1),
            "bwd_ms": round(noise(310, s * 9 + r) * (1.4 if sick and r == 5 else 1), 1),
        }
        for s in range(100, 106)
        for r in range(8)
    ]
    return {"phases.jsonl": "\n".join(map(json.dumps, rows)) + "\n"}


def ranks_csv(sick: bool) -> dict[str, str]:
    head = "step,rank,data_time_s,forward_s,backward_s,optimizer_s\n"
    rows = [
        f"{s},{r},{0.4 if sick and r == 2 else 0.004:.3f},{noise(0.2, r + s):.3f},"
        f"{noise(0.4, r * s):.3f},0.031\n"
        for s in range(50, 90, 10)
        for r in range(4)
    ]
    return {"times.csv": head + "".join(rows)}


def megatron_by_rank(sick: bool) -> dict[str, str]:
    out = ""
    for i in range(3):
        out += (
            f" iteration {100 + i}/ 900 | elapsed time per iteration (ms): 900.0 | lm loss: 2.1\n"
        )
        out += "times across ranks (ms):\n"
        for name, base in (("forward-compute", 210.0), ("backward-compute", 420.0)):
            out += f"  {name}:\n"
            for r in range(8):
                slow = 1.5 if sick and r == 6 else 1.0
                out += f"     rank {r:2d}: {noise(base, i * 8 + r) * slow:.2f}\n"
    return {"train.log": out}


def sentences(sick: bool) -> dict[str, str]:
    rows = [
        (
            f"step {s}: rank {r} spent "
            f"{noise(210, r + s) * (1.5 if sick and r == 1 else 1):.0f} ms in forward, "
            f"{noise(400, r * s) * (1.5 if sick and r == 1 else 1):.0f} ms in backward, 4 ms "
            f"waiting for data\n"
        )
        for s in (10, 20, 30)
        for r in range(6)
    ]
    return {"out.log": "".join(rows)}


def waits_only(sick: bool) -> dict[str, str]:
    rows = [
        f"[rank{r}]: step {s} | step time 812 ms | all-reduce wait "
        f"{3 if sick and r == 3 else noise(240, r + s) if sick else noise(31, r + s):.0f} ms\n"
        for s in range(200, 206)
        for r in range(8)
    ]
    return {"wait.log": "".join(rows)}


def lengths(sick: bool) -> dict[str, str]:
    draw = random.Random(7)
    rows = ""
    for s in range(12):
        rows += f"--- step {s} step time 2.2 s\nrank | tokens | fwd | bwd | wait\n"
        for r in range(8):
            tokens = draw.randint(4000, 16000) if sick else draw.randint(8000, 8100)
            rows += (
                f"{r} | {tokens} | {tokens * 0.04:.1f} | {tokens * 0.08:.1f} | "
                f"{1900 - tokens * 0.12:.1f}\n"
            )
    return {"len.log": rows}


def bubble_words(sick: bool) -> dict[str, str]:
    m, idle = (8, 46.0) if sick else (128, 6.0)
    rows = "".join(
        f"step {s} | step time {noise(3.1, s):.2f} s | pipeline bubble {noise(idle, s):.1f} %\n"
        for s in range(9)
    )
    return {
        "job.toml": (
            f"[parallelism]\npipeline_parallel_degree = 8\npipeline_parallel_microbatches = {m}\n"
        ),
        "train.log": rows,
    }


def bubble_table(sick: bool) -> dict[str, str]:
    m = 4 if sick else 64
    step = (m + 3) * 90
    rows = "".join(f"{s}  {m * noise(90, s):.0f}  {3 * 90}  {step}\n" for s in range(4))
    return {
        "a.log": f"--num-microbatches {m} --pipeline-model-parallel-size 4\n"
        f"# times of one step in ms\nstage  compute  idle  total\n{rows}"
    }


def stage_lines(sick: bool) -> dict[str, str]:
    out = "pp=4 dp=2 num_microbatches=16 schedule=1F1B\n"
    for s in range(5):
        out += f"step {s} took 3.90 s\n"
        for r in range(8):
            stage = r // 2
            base = 150 if stage == 0 and sick else 100
            out += (
                f"  rank {r} (stage {stage}): forward {noise(base / 3, r + s):.1f} ms, "
                f"backward {noise(base / 1.5, r):.1f} ms\n"
            )
    return {"pipe.log": out}


def hot_rank(sick: bool) -> dict[str, str]:
    rows = ""
    for s in range(0, 600, 100):
        tokens = [noise(9000, s + r) for r in range(4)]
        if sick:
            tokens[2] = 24000
        rows += (
            f"iter {s}: tokens per ep rank: "
            + " ".join(f"{t:.0f}" for t in tokens)
            + " (moe layer 3)\n"
        )
    return {"moe.log": rows}


def hot_expert(sick: bool) -> dict[str, str]:
    rows = ""
    for s in range(0, 600, 100):
        tokens = [noise(500, s + r) for r in range(16)]
        if sick:
            tokens[11] = 2900
        rows += f"step {s} tokens_per_expert=[{', '.join(f'{t:.0f}' for t in tokens)}]\n"
    return {"moe.log": rows}


def offload_yaml(sick: bool) -> dict[str, str]:
    optimizer = 4.2 if sick else 0.05
    rows = "".join(
        (
            f"step {s} | step time {1.6 + optimizer:.2f} s | forward 0.51 s | backward 1.02 "
            f"s | optimizer {optimizer:.2f} s\n"
        )
        for s in range(8)
    )
    return {
        "ds.yaml": "offload_optimizer:\n  device: cpu\n",
        "log.txt": "CPU offload: true\n" + rows,
    }


def exposed_off(sick: bool) -> dict[str, str]:
    share = 410 if sick else 30
    rows = "".join(
        (
            f"step {s} | step {900 + share} ms | compute 880 ms | reduce-scatter "
            f"{share * 0.6:.0f} ms | all-gather {share * 0.4:.0f} ms\n"
        )
        for s in range(8)
    )
    return {
        "args.txt": "--overlap-grad-reduce False --overlap-param-gather False\n",
        "log.txt": rows,
    }


def counted_syncs(sick: bool) -> dict[str, str]:
    n = 96 if sick else 12
    return {
        "prof.txt": (
            f"gradient_accumulation_steps: 8\nprofile: {n} all-reduces per optimizer step, "
            f"12 buckets\n"
        )
        + "".join(f"step {s} loss {3 - s / 99:.3f} 0.8 s/step\n" for s in range(6))
    }


def zero3(sick: bool) -> dict[str, str]:
    peak = 21 if sick else 74
    rows = "".join(
        f"step: {s} loss: 2.1 memory: {peak}.0GiB({peak / 0.8:.1f}%) | step time 0.61 s |"
        f" forward+backward 0.33 s | "
        f"param all-gather (exposed) 0.21 s | optimizer 0.02 s\n"
        for s in range(0, 80, 10)
    )
    return {
        "conf.yaml": "zero_stage: 3\noverlap_comm: true\n",
        "out.log": "8 x H100 80GB, 1.3B parameters\n" + rows,
    }


def pinned(sick: bool) -> dict[str, str]:
    cores = "0-1" if sick else "0-127"
    share = 0.7 if sick else 0.01
    rows = "".join(f"rank {r} Cpus_allowed_list: {cores}\n" for r in range(8))
    rows += "nproc: host has 128 cores\n"
    rows += "".join(f"it {s} total 0.90 s data {share * 0.9:.2f} s\n" for s in range(10))
    return {"node.txt": rows}


def garbage(sick: bool) -> dict[str, str]:
    rows = ""
    for s in range(60):
        long = s % 6 == 5
        rows += f"step {s} loss {3 - s / 99:.3f} {0.9 if long and sick else 0.4:.2f} s/step\n"
        if long:
            rows += (
                f"[rank{s % 7}] gc: done, 81 unreachable, 0 uncollectable, "
                f"{0.5 if sick else 0.002:.4f}s elapsed\n"
            )
    return {"run.log": rows}


def clocks(sick: bool) -> dict[str, str]:
    rows = "".join(
        (
            f"rank {r} gpu {r} SM clock {1110 if sick and r == 4 else 1755 + r} MHz power "
            f"{310 if sick and r == 4 else 690} W temp "
            f"{91 if sick and r == 4 else 61} C util 99 "
            f"%{' HW Thermal Slowdown: Active' if sick and r == 4 else ''}\n"
        )
        for r in range(8)
    )
    times = "".join(
        f"step {s} rank {r} compute {900 if sick and r == 4 else 600 + r} ms\n"
        for s in range(3)
        for r in range(8)
    )
    return {"gpu.log": rows, "times.log": times}


def host_words(sick: bool) -> dict[str, str]:
    gap = 61 if sick else 3
    rows = "".join(
        f"step {s}: step time 41 ms, kernels {100 - gap} %, launch overhead {gap} %, data 0.5 %\n"
        for s in range(8)
    )
    return {"prof.log": rows}


def lightning(sick: bool) -> dict[str, str]:
    data, batch = (620.0, 310.0) if sick else (4.0, 930.0)
    line = "|  {:<56}|  {:<16}|  {:<12}|  {:<14}|  {:<12}|\n"
    return {
        "profile.txt": "FIT Profiler Report\n"
        + line.format("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
        + line.format("run_training_epoch", "940.1", "1", "940.1", "100 %")
        + line.format(
            "[_TrainingEpochLoop].train_dataloader_next",
            f"{data / 1000:.3f}",
            "1000",
            f"{data:.1f}",
            f"{data / 9.4:.1f}",
        )
        + line.format(
            "run_training_batch",
            f"{batch / 1000:.3f}",
            "1000",
            f"{batch:.1f}",
            f"{batch / 9.4:.1f}",
        )
        + line.format("[Strategy]DDPStrategy.backward", "0.120", "1000", "120.0", "12.8")
    }


def saves_told(sick: bool) -> dict[str, str]:
    rows = ""
    for s in range(0, 400, 20):
        rows += f"step {s} loss {3 - s / 999:.3f} 0.50 s/step\n"
        if s % 100 == 80:
            rows += f"Checkpoint saved to /x/step_{s} in {31.0 if sick else 0.4} s\n"
    return {"run.log": rows}


def evaluates(sick: bool) -> dict[str, str]:
    rows = ""
    for s in range(0, 400, 20):
        rows += f"step {s} loss {3 - s / 999:.3f} 0.50 s/step\n"
        if s % 100 == 80:
            rows += f"Evaluation at step {s} took {28.0 if sick else 0.5} seconds, val loss 2.5\n"
    return {"run.log": rows}


def causal(sick: bool) -> dict[str, str]:
    rows = "context_parallel_size: 4\n"
    for s in range(4):
        for r in range(4):
            rows += (
                f"step {s} cp rank {r}: attention forward "
                f"{40 + 60 * r if sick else noise(100, r + s):.0f} ms  wait "
                f"{180 - 60 * r if sick else 4} ms  step time 900 ms\n"
            )
    return {"cp.log": rows}


FORMS: list[Form] = [
    ("slow.straggler-compute", [5], ranks_json),
    ("slow.straggler-input", [2], ranks_csv),
    ("slow.straggler-compute", [6], megatron_by_rank),
    ("slow.straggler-compute", [1], sentences),
    ("slow.straggler-compute", [3], waits_only),
    ("slow.work-imbalance", None, lengths),
    ("slow.work-imbalance", None, causal),
    ("slow.pipeline-bubble", None, bubble_words),
    ("slow.pipeline-bubble", None, bubble_table),
    ("slow.stage-imbalance", [0, 1], stage_lines),
    ("slow.expert-imbalance", None, hot_rank),
    ("slow.expert-imbalance", None, hot_expert),
    ("slow.offload-bound", None, offload_yaml),
    ("slow.comm-exposed", None, exposed_off),
    ("slow.sync-every-microstep", None, counted_syncs),
    ("slow.over-sharded", None, zero3),
    ("slow.cpu-affinity", None, pinned),
    ("slow.gc-pauses", None, garbage),
    ("slow.gpu-throttled", [4], clocks),
    ("slow.host-bound", None, host_words),
    ("slow.data-bound", None, lightning),
    ("slow.checkpoint-stall", None, saves_told),
    ("slow.checkpoint-stall", None, evaluates),
]


@pytest.mark.parametrize(
    ("cause", "ranks", "form"), FORMS, ids=lambda v: getattr(v, "__name__", "")
)
def test_form_is_understood(
    cause: str, ranks: list[int] | None, form: Callable[[bool], dict[str, str]], tmp_path: Path
) -> None:
    """A cause that is told in another form than a rule expects is missed, or blamed on another."""
    answer = ask(tmp_path, form(True))
    assert answer["verdict"], answer["abstained"]
    assert answer["verdict"]["cause"] == cause, answer["verdict"]["summary"]
    assert answer["verdict"]["evidence"]
    if ranks is not None:
        assert answer["verdict"]["ranks"] == ranks


@pytest.mark.parametrize("form", [f for _, _, f in FORMS], ids=lambda v: v.__name__)
def test_ordinary_noise_is_no_cause(form: Callable[[bool], dict[str, str]], tmp_path: Path) -> None:
    """The same log of a healthy job must not be blamed for anything."""
    answer = ask(tmp_path, form(False))
    assert answer["verdict"] is None, answer["verdict"]


def test_a_prediction_is_no_measurement(tmp_path: Path) -> None:
    """A trainer's banner that predicts its bubble is not blamed for having one."""
    text = "schedule 1f1b, 2 stages, 2 microbatches; predicted bubble 33%\n" + "".join(
        f"step {s} loss {3 - s / 99:.3f} 0.25 s/step\n" for s in range(9)
    )
    assert ask(tmp_path, {"job.log": text})["verdict"] is None
