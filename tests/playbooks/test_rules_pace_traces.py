"""What sets the pace, from Kineto traces, stacks and places of ranks: each sick and healthy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from collectors.readers import read_paths
from playbooks.engine import diagnose

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Form = Callable[[bool], dict[str, str]]

STEP = 100_000.0
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"
ROUTE = "ncclDevKernel_SendRecv(x)"


def ask(tmp_path: Path, files: dict[str, str]) -> dict[str, Any]:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return diagnose(read_paths([str(tmp_path)])).as_json()


def kernel(name: str, at: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": length, "args": args}


def trace(rank: int, world: int, events: list[dict[str, Any]], steps: int = 3) -> str:
    marks = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{s}",
            "ts": s * STEP,
            "dur": STEP - 1,
        }
        for s in range(steps)
    ]
    info = {"rank": rank, "world_size": world, "backend": "nccl"}
    return json.dumps(
        {"schemaVersion": 1, "distributedInfo": info, "traceEvents": [*marks, *events]}
    )


def reduces(sick: bool) -> dict[str, str]:
    """Three buckets, hidden behind compute; once a step or once a microstep."""
    out = {}
    for rank in range(2):
        events = []
        for s in range(3):
            begin = s * STEP + 10
            events.append(kernel("gemm", begin, STEP - 100))
            for k in range(4 if sick else 1):
                for b, size in enumerate((4_000_000, 9_000_000, 6_000_000)):
                    at = begin + 20_000 * k + 3_000 * b
                    sized = {"In msg nelems": size, "Out msg nelems": size}
                    events.append(kernel(REDUCE, at, 2_000.0, **sized))
        out[f"rank{rank}.json"] = trace(rank, 2, events)
    return out


def routes(sick: bool) -> dict[str, str]:
    """Four expert-parallel ranks; the hot one computes longer and is waited for."""
    out = {}
    for rank in range(4):
        hot = sick and rank == 2
        got = 30_000_000 if hot else 8_000_000
        events = []
        for s in range(3):
            for k in range(4):
                at = s * STEP + 20_000 * k + 10
                busy = 14_000.0 if hot else 4_000.0
                wait = 15_000.0 - busy if sick else 800.0
                sized = {"Collective name": "all_to_allv", "In msg nelems": 8_000_000}
                events.append(kernel("grouped_gemm", at, busy))
                events.append(kernel(ROUTE, at + busy, wait, **sized, **{"Out msg nelems": got}))
        out[f"rank{rank}.json"] = trace(rank, 4, events)
    return out


def copies(sick: bool) -> dict[str, str]:
    """Parameters go to the device and gradients back; without offload only batches go in."""
    out = {}
    for rank in range(2):
        events = []
        for s in range(3):
            begin = s * STEP + 10
            events.append(kernel("gemm", begin, 35_000.0 if sick else 95_000.0))
            for k, way in enumerate(("HtoD", "DtoH") if sick else ("HtoD",)):
                name = f"Memcpy {way} (Pinned -> Device)"
                length = 28_000.0 if sick else 300.0
                at = begin + 36_000 + 30_000 * k if sick else begin + 96_000
                events.append({**kernel(name, at, length), "cat": "gpu_memcpy"})
        out[f"rank{rank}.json"] = trace(rank, 2, events)
    return out


def one_bucket(sick: bool) -> dict[str, str]:
    """All gradients in one message after the last kernel; or in pieces behind the kernels."""
    out = {}
    for rank in range(4):
        events = []
        for s in range(3):
            begin = s * STEP + 10
            events.append(kernel("gemm", begin, 70_000.0))
            at = begin + 70_000 if sick else begin + 40_000
            events.append(kernel(REDUCE, at, 26_000.0, **{"In msg nelems": 10**9}))
        out[f"rank{rank}.json"] = trace(rank, 4, events)
    return out


def dumps_of_stacks(sick: bool) -> dict[str, str]:
    frames = (
        "    select (selectors.py:415)\n    _try_get_data (torch/utils/data/dataloader.py:1243)\n"
        "    _next_data (torch/utils/data/dataloader.py:1448)\n"
        if sick
        else "    forward (model.py:31)\n"
    )
    out = {
        f"rank{r}_{look}.txt": f"Process {100 + r}: python train.py\n"
        f'Thread {100 + r} (idle): "MainThread"\n'
        f"{frames}    main (train.py:88)\n"
        for r in range(4)
        for look in range(2)
    }
    return out | {"run.log": "".join(f"step {i} loss {3 - i / 99:.3f}\n" for i in range(9))}


def far_cores(sick: bool) -> dict[str, str]:
    topo = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV12\t0-31\t0\n"
    topo += "GPU1\tNV12\t X \t32-63\t1\n"
    masks = "rank 0 Cpus_allowed_list: 0-31\n"
    masks += f"rank 1 Cpus_allowed_list: {'0-31' if sick else '32-63'}\n"
    rows = "".join(
        f"step {s} rank {r} compute {800 if sick and r == 1 else 600} ms data 2 ms\n"
        for s in range(4)
        for r in range(2)
    )
    return {"topo.txt": topo, "masks.log": masks, "times.log": rows}


def a_stage_of_ranks(sick: bool) -> dict[str, str]:
    rows = "--pipeline-model-parallel-size 4\n" + "".join(
        f"step {s} rank {r} compute {900 if sick and r in (6, 7) else 600} ms data 2 ms\n"
        for s in range(4)
        for r in range(8)
    )
    return {"times.log": rows}


def clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def times_of_day(sick: bool) -> dict[str, str]:
    text, now = "", 36_000
    for i in range(60):
        now += 2
        text += f"[{clock(now)}] step {i} loss {3 - i / 99:.3f}\n"
        if i % 10 == 9:
            text += f"[{clock(now)}] writing checkpoint to /lustre/x\n"
            now += 40 if sick else 0
    return {"run.log": text}


def progress_bar(sick: bool) -> dict[str, str]:
    text, now = "", 0
    for i in range(60):
        now += 2
        text += f" {i}%|##| {i}/600 [{now // 60:02d}:{now % 60:02d}<20:00,  2.00s/it]\n"
        if i % 10 == 9:
            text += "Saving model checkpoint to out\n"
            now += 40 if sick else 0
    return {"run.log": text}


def exporter(sick: bool) -> dict[str, str]:
    rows = ""
    for g in range(8):
        hot = sick and g == 6
        told = {"SM_CLOCK": 1005 if hot else 1755, "GPU_UTIL": 99, "GPU_TEMP": 93 if hot else 60}
        for name, value in (told | {"CLOCK_THROTTLE_REASONS": 64 if hot else 0}).items():
            rows += f'DCGM_FI_DEV_{name}{{gpu="{g}",UUID="GPU-{g}",Hostname="n3"}} {value}\n'
    return {"metrics.prom": rows}


def compiles_again(sick: bool) -> dict[str, str]:
    text, now = "", 36_000
    for i in range(40):
        if sick and i % 6 == 4:
            text += f"[{clock(now)}] torch._dynamo: recompiling forward, guard failed: x.size(1)\n"
            now += 30
        now += 1
        text += f"[{clock(now)}] step {i} loss {3 - i / 99:.3f}\n"
    return {"run.log": text}


FORMS: list[tuple[str, list[int] | None, Form]] = [
    ("slow.sync-every-microstep", None, reduces),
    ("slow.expert-imbalance", [2], routes),
    ("slow.offload-bound", None, copies),
    ("slow.comm-exposed", None, one_bucket),
    ("slow.data-bound", None, dumps_of_stacks),
    ("slow.cpu-affinity", [1], far_cores),
    ("slow.stage-imbalance", [6, 7], a_stage_of_ranks),
    ("slow.checkpoint-stall", None, times_of_day),
    ("slow.checkpoint-stall", None, progress_bar),
    ("slow.gpu-throttled", None, exporter),
    ("slow.recompiles", None, compiles_again),
]


@pytest.mark.parametrize(
    ("cause", "ranks", "form"), FORMS, ids=lambda v: getattr(v, "__name__", "")
)
def test_trace_tells_the_cause(
    cause: str, ranks: list[int] | None, form: Form, tmp_path: Path
) -> None:
    """A profile that is not understood leaves its user without an answer."""
    answer = ask(tmp_path, form(True))
    assert answer["verdict"], answer["abstained"]
    assert answer["verdict"]["cause"] == cause, answer["verdict"]["summary"]
    if ranks is not None:
        assert answer["verdict"]["ranks"] == ranks


@pytest.mark.parametrize("form", [f for _, _, f in FORMS], ids=lambda v: v.__name__)
def test_ordinary_traces_accuse_nobody(form: Form, tmp_path: Path) -> None:
    """A healthy profile must not be blamed for anything."""
    answer = ask(tmp_path, form(False))
    assert answer["verdict"] is None, answer["verdict"]
