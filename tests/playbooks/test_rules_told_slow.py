"""Slow jobs and wrong numbers in logs and traces: what decides, what only looks like it."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from collectors.readers import read_paths
from playbooks.engine import diagnose

if TYPE_CHECKING:
    from pathlib import Path


def ask(tmp_path: Path, **files: str) -> dict[str, Any]:
    for name, text in files.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    return diagnose(read_paths([str(tmp_path)])).as_json()


def cause(answer: dict[str, Any]) -> str | None:
    return answer["verdict"]["cause"] if answer["verdict"] else None


def steps(n: int, loss: Any = None, seconds: Any = None, more: str = "", begin: int = 0) -> str:
    out, clock = [], 0.0
    for i in range(n):
        took = seconds(i) if seconds else 2.0
        clock += took
        at = f"2025-04-05 0{int(clock // 3600)}:{int(clock // 60 % 60):02d}:{int(clock % 60):02d}"
        value = loss(i) if loss else 5 - i / 50
        out.append(f"{at} step {begin + i} | loss {value:.4f} {more} | {took:.2f} s")
    return "\n".join(out) + "\n"


SMI = (
    "index, clocks_event_reasons.active, clocks.sm [MHz], power.draw [W], power.limit [W], "
    "utilization.gpu [%]\n"
)
FINE = "".join(f"{i}, 0x0, 1700 MHz, 400 W, 450 W, 98 %\n" for i in range(3))
HOT = "3, 0x20, 1100 MHz, 300 W, 450 W, 98 %\n"
CAPPED = "3, 0x4, 1650 MHz, 446 W, 450 W, 98 %\n"
IDLE = "3, 0x20, 345 MHz, 60 W, 450 W, 0 %\n"
SAVE = "saving checkpoint at iteration {} to /x\n"
SAVES = "".join(
    steps(6, begin=b).replace("05 00:", f"05 0{h}:") + SAVE.format(b + 5)
    for h, b in enumerate((0, 6, 12))
)
AGAIN = "[__recompiles] Recompiling function step in /m.py:4\n"
RANKS = "rank  load  forward  backward  wait\n" + "".join(
    f"{r}  1.0  {12 if r == 6 else 8}  {25 if r == 6 else 17}  {1 if r == 6 else 13}\n"
    for r in range(8)
)
OVERFLOW = "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
DOWN = "".join(OVERFLOW.format(2**k, 2 ** (k - 1)) for k in range(8, 0, -1))
LOAD = "  layer {} load % [{} 1.0 0.5 0.5] entropy 0.1\n"
ROUTED = "".join(LOAD.format(n, 98) for n in (2, 5) for _ in range(4))

POSITIVE: list[tuple[str, list[int] | None, dict[str, str]]] = [
    ("slow.gpu-throttled", None, {"g_csv": SMI + FINE + HOT}),
    (
        "slow.gpu-throttled",
        [6],
        {
            "a_log": RANKS,
            "g1_csv": SMI + FINE + "3, 0x0, 1700, 400, 450, 98\n",
            "g2_csv": SMI
            + FINE[: FINE.index("2, ")]
            + "2, 0x40, 900, 200, 450, 98\n3, 0x0, 1700, 1, 450, 98\n",
        },
    ),
    ("slow.straggler-compute", [6], {"a_log": RANKS}),
    (
        "slow.data-bound",
        None,
        {
            "a_log": "".join(
                f"Epoch: [1][{i:3d}/90] Time 0.80 (0.81) Data 0.51 (0.50) Loss {3 - i / 99:.3f}\n"
                for i in range(9)
            )
        },
    ),
    ("slow.checkpoint-stall", None, {"a_log": SAVES}),
    (
        "slow.data-bound",
        None,
        {"a_log": "rank data fwd bwd\n" + "".join(f"{r} 60 20 40\n" for r in range(4))},
    ),
    (
        "slow.checkpoint-stall",
        None,
        {
            "a_log": "".join(
                f"iteration {i}/ 900 | elapsed time per iteration (ms): 900.0 | lm loss: "
                f"{9 - i / 99:.3E}\n"
                + (
                    f"saving checkpoint at iteration {i} to /x\n    save-checkpoint ...: (31000.0, "
                    "33000.0)\n"
                    if i % 40 == 0
                    else ""
                )
                for i in range(10, 130, 10)
            )
        },
    ),
    (
        "slow.recompiles",
        None,
        {
            "a_log": steps(9)
            + (AGAIN + steps(1, seconds=lambda _: 40.0, begin=9) + steps(3, begin=10)) * 3
        },
    ),
    ("numeric.loss-scale-collapse", None, {"a_log": steps(9) + DOWN}),
    (
        "numeric.nan",
        None,
        {
            "a_log": "".join(
                f"{{'loss': {2 - i / 9:.3f}, 'grad_norm': 0.5, 'epoch': 0.{i}}}\n" for i in range(9)
            )
            + "{'loss': nan, 'grad_norm': nan, 'epoch': 1.0}\n"
        },
    ),
    ("numeric.nan", None, {"a_log": steps(12) + "step 12 | loss nan\nstep 13 | loss nan\n"}),
    (
        "numeric.nan",
        [3],
        {"a_log": steps(12) + "[rank3]: non-finite: step 12: blocks.4.attn.proj has inf\n"},
    ),
    (
        "numeric.divergence",
        None,
        {
            "a_log": "".join(
                f"step {i} loss {5 - i / 10 if i < 25 else 2.5 + (i - 25) / 5:.3f} "
                f"grad_norm {0.4 if i < 25 else 0.4 + (i - 25) / 4:.3f}\n"
                for i in range(45)
            )
        },
    ),
    ("numeric.router-collapse", None, {"a_log": "router_aux_loss_coef=0.0\n" + ROUTED}),
    (
        "numeric.resume-state",
        None,
        {
            "a_log": "Resuming from step 4000\n" + steps(5, begin=4000),
            "b_log": "no checkpoint found in /scratch/run\n" + steps(5),
        },
    ),
]


@pytest.mark.parametrize(
    ("wanted", "ranks", "files"), POSITIVE, ids=[f"{i}-{p[0]}" for i, p in enumerate(POSITIVE)]
)
def test_the_kind_is_named(
    tmp_path: Path, wanted: str, ranks: list[int] | None, files: dict[str, str]
) -> None:
    answer = ask(tmp_path, **files)
    assert cause(answer) == wanted, answer["abstained"]
    if ranks is not None:
        assert answer["verdict"]["ranks"] == ranks


NEAR: list[tuple[str, dict[str, str]]] = [
    ("slow.gpu-throttled", {"g_csv": SMI + FINE + CAPPED}),
    ("slow.gpu-throttled", {"g_csv": SMI + FINE + IDLE}),
    ("slow.straggler-compute", {"a_log": RANKS.replace("12  25", "8  18")}),
    (
        "slow.data-bound",
        {
            "a_log": "".join(
                f"Epoch: [1][{i:3d}/90] Time 0.80 (0.81) Data 0.01 (0.01) Loss 2.{i}\n"
                for i in range(9)
            )
        },
    ),
    (
        "slow.checkpoint-stall",
        {
            "a_log": "".join(
                text + "\n" + (SAVE.format(n) if n % 6 == 5 else "")
                for n, text in enumerate(steps(18).splitlines())
            )
        },
    ),
    ("slow.recompiles", {"a_log": AGAIN * 9 + steps(30)}),
    ("numeric.loss-scale-collapse", {"a_log": DOWN + steps(30)}),
    ("numeric.nan", {"a_log": steps(6) + "step 6 | loss nan\n" + steps(9, begin=7)}),
    ("numeric.divergence", {"a_log": steps(40, loss=lambda i: 9.0 if i == 20 else 5 - i / 20)}),
    ("numeric.divergence", {"a_log": steps(40, loss=lambda i: 2.0 + (i % 3) / 9)}),
    ("numeric.router-collapse", {"a_log": "router_aux_loss_coef=0.02\n" + ROUTED}),
    (
        "numeric.router-collapse",
        {"a_log": "router_aux_loss_coef=0.0\n" + ROUTED.replace("98", "1")},
    ),
    (
        "numeric.resume-state",
        {"a_log": "Resuming from step 4000\n", "b_log": "Resuming from step 4000\n"},
    ),
]


@pytest.mark.parametrize(("other", "files"), NEAR, ids=[f"{i}-{p[0]}" for i, p in enumerate(NEAR)])
def test_a_look_alike_is_not_that_kind(tmp_path: Path, other: str, files: dict[str, str]) -> None:
    answer = ask(tmp_path, **files)
    assert all(f["cause"] != other or f["role"] != "root" for f in answer["findings"])


def trace(rank: int, late: int | None, category: str = "kernel", data: float = 10.0) -> str:
    """Four steps of four collectives: the late rank computes longer and waits least."""
    events: list[dict[str, Any]] = []
    for step in range(4):
        begin = 100_000.0 + step * 50_000
        one = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin}
        events.append({**one, "dur": 49_000.0})
        wait = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        events.append({**one, "name": wait, "dur": data})
        for k in range(4):
            busy = 9_000.0 if rank == late else 5_000.0
            at = begin + k * 11_000
            gemm = {"ph": "X", "cat": category, "name": "gemm_x", "ts": at, "dur": busy}
            events += [
                gemm,
                {
                    **gemm,
                    "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)",
                    "ts": at + busy,
                    "dur": 10_000.0 - busy,
                },
            ]
    head = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "host_name": "h",
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 3},
    }
    return json.dumps({**head, "traceEvents": events, "traceName": "x.json"})


@pytest.mark.parametrize("category", ["kernel", "Kernel"])
def test_traces_name_the_rank_that_comes_last(tmp_path: Path, category: str) -> None:
    for rank in range(3):
        packed = gzip.compress(trace(rank, 1, category).encode())
        (tmp_path / f"w{rank}.json.gz").write_bytes(packed)
    answer = diagnose(read_paths([str(tmp_path)])).as_json()
    assert cause(answer) == "slow.straggler-compute"
    assert answer["verdict"]["ranks"] == [1]


def test_even_traces_accuse_nobody(tmp_path: Path) -> None:
    assert cause(ask(tmp_path, **{f"w{r}_json": trace(r, None) for r in range(3)})) is None


def test_a_trace_that_waits_for_batches_is_bound_by_data(tmp_path: Path) -> None:
    assert cause(ask(tmp_path, w_json=trace(0, None, data=20_000.0))) == "slow.data-bound"


def test_a_cut_trace_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    text = trace(0, None)
    answer = ask(tmp_path, w_json=text[: len(text) // 2])
    source = answer["coverage"]["sources"][0]
    assert source["kind"] == "kineto"
    assert source["read"] == "part"
    assert answer["coverage"]["ranks_seen"] == [0]


@pytest.mark.parametrize(
    "text",
    [
        '{"schemaVersion": 1, "deviceProperties": ["',
        '{"traceEvents": [{"ph": "X", "ts": "a", "dur": 1',
        '{"traceEvents": [1, null, {"ph": "X", "name": 3, "ts": {}, "dur": 2}]}',
        '{"distributedInfo": [], "traceEvents": [' + "[" * 5000,
    ],
)
def test_hostile_traces_are_a_problem_of_their_source(tmp_path: Path, text: str) -> None:
    assert ask(tmp_path, w_json=text)["abstained"] is not None
