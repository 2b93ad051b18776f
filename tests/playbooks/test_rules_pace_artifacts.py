"""What sets the pace, from artifacts of tools: samples of GPUs, dumps, profiles, counters.

Each once sick and once with ordinary noise; and every rule of the family without any data.
"""

from __future__ import annotations

import importlib
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from collectors.collected import empty
from collectors.readers import read_paths
from playbooks.engine import diagnose
from playbooks.evidence import Evidence
from playbooks.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Form = Callable[[bool], dict[str, str]]

MODULES = [
    "arrivals",
    "profiled",
    "profiled_kernels",
    "slow_data",
    "slow_experts",
    "slow_gpus",
    "slow_host",
    "slow_last",
    "slow_logs",
    "slow_pauses",
    "slow_ranks",
    "slow_reductions",
    "slow_sharding",
    "slow_shares",
    "slow_stages",
]


def ask(tmp_path: Path, files: dict[str, str]) -> dict[str, Any]:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return diagnose(read_paths([str(tmp_path)])).as_json()


def noise(value: float, seed: int) -> float:
    return value * (1 + random.Random(seed).uniform(-0.02, 0.02))


def steps(n: int = 9, seconds: float = 1.0) -> str:
    return "".join(f"step {i} loss {3 - i / 99:.3f} {seconds:.2f} s/step\n" for i in range(n))


def dmon(sick: bool) -> dict[str, str]:
    head = "# gpu   pwr gtemp mtemp    sm   mem  mclk  pclk pviol tviol\n"
    rows = [
        f"    {g}   {310 if sick and g == 5 else 680}  {90 if sick and g == 5 else 62}  80  99  "
        f"60  2619  {1120 if sick and g == 5 else 1740}  0  {int(sick and g == 5)}\n"
        for _ in range(4)
        for g in range(8)
    ]
    return {"dmon.txt": head + "".join(rows)}


def report(sick: bool) -> dict[str, str]:
    text = "==============NVSMI LOG==============\n\nAttached GPUs : 4\n"
    for g in range(4):
        held = sick and g == 1
        text += (
            f"GPU 00000000:{g + 1}8:00.0\n    Clocks Event Reasons\n"
            f"        HW Power Brake Slowdown           : {'Active' if held else 'Not Active'}\n"
            "    GPU Power Readings\n        Average Power Draw                : 350.10 W\n"
            "        Current Power Limit               : 400.00 W\n"
            "        Default Power Limit               : 400.00 W\n    Clocks\n"
            f"        SM                                : {700 if held else 1410} MHz\n"
        )
    return {"smi.txt": text}


def hosts(sick: bool) -> dict[str, str]:
    rows = [
        f"n{h:02d}  {h * 8}-{h * 8 + 7}  {1200 if sick and h == 1 else 1740}  "
        f"{395 if sick and h == 1 else 670}  {400 if sick and h == 1 else 700}  "
        f"{2100 if sick and h == 1 else 1500}\n"
        for h in range(4)
    ]
    head = "host  ranks  sm_clock_MHz  power_W  limit_W  step_compute_ms\n"
    return {"hosts.txt": head + "".join(rows)}


def inspector(sick: bool) -> dict[str, str]:
    out = {}
    for r in range(4):
        rows = []
        for i in range(40):
            time = (5000 if r != 3 else 300) if sick else 320
            rows.append(
                json.dumps(
                    {
                        "header": {"id": "0xab", "rank": r, "n_ranks": 4, "nnodes": 1},
                        "metadata": {"dump_timestamp_us": 10**15 + i * 20_000, "hostname": "n0"},
                        "coll_perf": {
                            "coll": "AllReduce",
                            "coll_sn": i,
                            "coll_msg_size_bytes": 10**8,
                            "coll_exec_time_us": time + (i * 7 + r) % 20,
                        },
                    }
                )
            )
        out[f"n0-pid{100 + r}.log"] = "\n".join(rows) + "\n"
    return out


def dumps(sizes: list[int], late: int | None = None) -> dict[str, str]:
    """Flight Recorder dumps of four ranks whose clocks differ by hours."""
    out = {}
    for r in range(4):
        entries = []
        for seq, size in enumerate(sizes, 1):
            at = 10**18 + r * 3600 * 10**9 + seq * 10**8
            wait = 60_000_000 if late is not None else 0
            begin = at + (wait if r == late else 0)
            end = at + wait + 9_000_000
            entries.append(
                {
                    "record_id": seq,
                    "process_group": ["0", "default_pg"],
                    "collective_seq_id": seq,
                    "profiling_name": "nccl:all_reduce",
                    "time_created_ns": begin,
                    "input_sizes": [[size]],
                    "output_sizes": [[size]],
                    "input_dtypes": ["Float"],
                    "output_dtypes": ["Float"],
                    "state": "completed",
                    "time_discovered_started_ns": begin + 1000,
                    "time_discovered_completed_ns": end,
                    "retired": True,
                    "is_p2p": False,
                }
            )
        pg = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
        status = {k: len(sizes) for k in ("last_enqueued_collective", "last_completed_collective")}
        out[f"trace_rank_{r}.json"] = json.dumps(
            {"version": "2.10", "pg_config": pg, "pg_status": {"0": status}, "entries": entries}
        )
    return out


def late_in_dumps(sick: bool) -> dict[str, str]:
    return dumps([4_000_000, 5_000_000, 3_000_000] * 6, 2 if sick else None)


def each_microstep(sick: bool) -> dict[str, str]:
    one = [4_000_000, 5_000_000, 3_000_000]
    return dumps((one * (4 if sick else 1) + [1]) * 4) | {"run.sh": "--grad-accum-steps 4\n"}


def each_microstep_by_design(sick: bool) -> dict[str, str]:
    return each_microstep(sick=True) | ({} if sick else {"ds.json": '{"zero_stage": 2}\n'})


def key_averages(sick: bool) -> dict[str, str]:
    line = "{:>31}  {:>12}  {:>12}  {:>12}  {:>12}\n"
    text = line.format("Name", "Self CPU %", "Self CPU", "Self CUDA", "# of Calls")
    text += line.format("cudaLaunchKernel", "61.20%", "6.2s", "0.000us", "812345")
    text += line.format("aten::mm", "4.00%", "0.4s", "1.2s", "30000")
    device = 2.1 if sick else 9.8
    return {
        "prof.txt": f"{text}Self CPU time total: 10.2s\nSelf CUDA time total: {device}s\n",
    }


def compile_column(sick: bool) -> dict[str, str]:
    rows = ""
    for i in range(40):
        again = 31.0 if sick and i % 6 == 4 else 0.0
        rows += f"step {i} total {0.8 + again:.2f} s fwd 0.25 s bwd 0.5 s compile {again:.2f} s\n"
    return {"run.log": rows}


def temporal(sick: bool) -> dict[str, str]:
    apart = 300_000 if sick else 20_000
    rows = [
        f"{r},{noise(20_000, r):.0f},{noise(700_000, r + 9):.0f},{noise(apart, r):.0f},"
        f"{720_000 + apart},1.9,{68 if sick else 95},{29 if sick else 2.7}\n"
        for r in range(4)
    ]
    head = (
        "rank,idle_time(us),compute_time(us),non_compute_time(us),kernel_time(us),idle_time_pctg,"
        "compute_time_pctg,non_compute_time_pctg\n"
    )
    return {"temporal.csv": head + "".join(rows), "ds.yaml": "overlap_comm: false\n"}


def microsteps(sick: bool) -> dict[str, str]:
    waits = 460 if sick else 9
    row = (
        f"[Rank 0] time (ms) | fwd_microstep: 210.1 | bwd_microstep: {430 + waits}.0 | "
        f"bwd_inner_microstep: 420.0 | bwd_allreduce_microstep: {waits}.0 | step_microstep: 41.0\n"
    )
    return {"ds.log": '{"zero_optimization": {"stage": 1, "overlap_comm": false}}\n' + row * 8}


def tensor_parallel(sick: bool) -> dict[str, str]:
    rows = "".join(
        f"step {i} step time 310 ms, compute {170 if sick else 290} ms, tp all-reduce exposed "
        f"{130 if sick else 10} ms, peak memory 11.0 GiB\n"
        for i in range(8)
    )
    return {"a.log": "tensor_model_parallel_size: 8\n1.3B parameters, 8 x H100 80GB\n" + rows}


def recomputes(sick: bool) -> dict[str, str]:
    rows = "".join(
        f"step {i} | step time 900 ms | forward 220 ms | recompute {230 if sick else 2} ms | "
        f"backward 420 ms | max mem {24 if sick else 75}.0 GiB\n"
        for i in range(8)
    )
    return {"a.log": "--recompute-granularity full\n4 x H100 80GB\n" + rows}


def copies(sick: bool) -> dict[str, str]:
    rows = "".join(
        f"step {i} | total 4.1 s | h2d params {1.6 if sick else 0.05} s | d2h grads "
        f"{0.9 if sick else 0.02} s | fwd 0.5 s | bwd 1.0 s\n"
        for i in range(8)
    )
    return {"a.log": "cpu_offload: true\n" + rows}


def ratio(sick: bool) -> dict[str, str]:
    rows = "".join(
        f"iteration {i * 10} | layer {layer} | expert load max/mean "
        f"{noise(3.4 if sick else 1.1, i + layer):.2f} | dropped 0.0 %\n"
        for i in range(6)
        for layer in (2, 6, 10)
    )
    return {"moe.log": rows}


def collects(sick: bool) -> dict[str, str]:
    rows = "step rank fwd_ms bwd_ms gc_ms step_ms\n"
    for i in range(40):
        long = sick and i % 4 == 1
        for r in range(4):
            pause = 300.0 if long and r == (i // 4) % 4 else 0.0
            rows += f"{i} {r} {noise(100, i + r):.1f} {noise(200, i * r):.1f} {pause} "
            rows += f"{620.0 if long else 320.0}\n"
    return {"gc.txt": rows}


def cpuset(sick: bool) -> dict[str, str]:
    share = 0.55 if sick else 0.01
    rows = "".join(f"step {i} total 1.0 s data {share} s\n" for i in range(9))
    cores = "0-1" if sick else "0-95"
    return {
        "n.txt": f"cpuset.cpus.effective: {cores}\nhost has 96 cores\nnum_workers: 8\n{rows}",
    }


def stages_of_ranks(sick: bool) -> dict[str, str]:
    m = 4 if sick else 96
    rows = "".join(
        f"rank {r} (stage {r}): busy {100 * m / (m + 3):.1f} %, waiting for peers "
        f"{300 / (m + 3):.1f} %\n"
        for r in range(4)
    )
    return {"p.log": f"1F1B, pipeline stages: 4, microbatches per step: {m}\n{rows}"}


def longest(sick: bool) -> dict[str, str]:
    draw = random.Random(3)
    rows = []
    for i in range(10):
        for r in range(4):
            length = draw.randint(1000, 8000) if sick else 4096
            time = round(80 + length * 0.11 + draw.random(), 1)
            rows.append({"iter": i, "rank": r, "max_seq_len": length, "fwd_bwd_ms": time})
    return {"w.jsonl": "\n".join(map(json.dumps, rows)) + "\n"}


def calls(sick: bool) -> dict[str, str]:
    made = 36 if sick else 9
    return {
        "a.log": "gradient_accumulation_steps=4, DDP\n"
        f"nsys: ncclAllReduce calls per optimizer step: {made} (buckets: 9)\n{steps()}",
    }


FORMS: list[tuple[str, list[int] | None, Form]] = [
    ("slow.gpu-throttled", None, dmon),
    ("slow.gpu-throttled", None, report),
    ("slow.gpu-throttled", list(range(8, 16)), hosts),
    ("slow.straggler-compute", [3], inspector),
    ("slow.straggler-compute", [2], late_in_dumps),
    ("slow.sync-every-microstep", None, each_microstep),
    ("slow.sync-every-microstep", None, each_microstep_by_design),
    ("slow.sync-every-microstep", None, calls),
    ("slow.host-bound", None, key_averages),
    ("slow.recompiles", None, compile_column),
    ("slow.comm-exposed", None, temporal),
    ("slow.comm-exposed", None, microsteps),
    ("slow.over-sharded", None, tensor_parallel),
    ("slow.over-sharded", None, recomputes),
    ("slow.offload-bound", None, copies),
    ("slow.expert-imbalance", None, ratio),
    ("slow.gc-pauses", None, collects),
    ("slow.cpu-affinity", None, cpuset),
    ("slow.pipeline-bubble", None, stages_of_ranks),
    ("slow.work-imbalance", None, longest),
]


@pytest.mark.parametrize(
    ("cause", "ranks", "form"), FORMS, ids=lambda v: getattr(v, "__name__", "")
)
def test_artifact_tells_the_cause(
    cause: str, ranks: list[int] | None, form: Form, tmp_path: Path
) -> None:
    """A tool's own output that is not understood leaves its user without an answer."""
    answer = ask(tmp_path, form(True))
    assert answer["verdict"], answer["abstained"]
    assert answer["verdict"]["cause"] == cause, answer["verdict"]["summary"]
    assert answer["verdict"]["evidence"]
    if ranks is not None:
        assert answer["verdict"]["ranks"] == ranks


@pytest.mark.parametrize("form", [f for _, _, f in FORMS], ids=lambda v: v.__name__)
def test_ordinary_artifacts_accuse_nobody(form: Form, tmp_path: Path) -> None:
    """The same output of a healthy job must not be blamed for anything."""
    answer = ask(tmp_path, form(False))
    assert answer["verdict"] is None, answer["verdict"]


@pytest.mark.parametrize("name", MODULES)
def test_without_data_a_rule_says_nothing(name: str) -> None:
    """No data is not a slow job."""
    module = importlib.import_module(f"playbooks.rules.{name}")
    assert module.rule(Evidence(empty()), Policy()) == []
