"""Kineto traces: what the device did, whatever the layout of the JSON."""

from __future__ import annotations

import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.readers import intervals, kineto_stream, read_paths
from collectors.readers.artifact import from_bytes
from collectors.readers.kineto_kernels import COMMUNICATION, COMPUTE, MEMORY, Kernels, communicates
from playbooks.evidence import Evidence
from playbooks.metrics import device_time
from playbooks.policy import Policy

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "kineto"
here = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not beside the checkout")


def kernel(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, **more}


EVENTS = [
    kernel("gemm", 0, 40),
    kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 30, 30, args={"Process Group Name": "7"}),
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 55, "dur": 15},
    kernel("gemm", 90, 10),
    {"ph": "X", "cat": "cpu_op", "name": 'a "}, {" in a name', "ts": 0, "dur": 1, "args": {}},
    {"ph": "M", "name": "process_name", "args": {"labels": [{"ph": 1}, {"ph": 2}]}},
]


def told(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    collected = read_paths([str(path)])
    (row,) = [r for r in collected.rows("log_events") if r["kind"] == "kineto.rank"]
    fields: dict[str, Any] = json.loads(row["fields"])
    return fields


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_parts_of_the_device_time_sum_to_its_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, piece: int
) -> None:
    monkeypatch.setattr(kineto_stream, "_PIECE", piece)
    trace = {"distributedInfo": {"rank": 3, "world_size": 8}, "traceEvents": EVENTS}
    device = told(tmp_path / "t.json", json.dumps(trace, indent=indent))["device_us"]
    parts = {name: device[name] for name in ("compute", "exposed", "memory", "idle")}
    assert parts == {"compute": 50.0, "exposed": 20.0, "memory": 10.0, "idle": 20.0}
    assert device["span"] == 100.0
    assert device["overlapped"] == 10.0
    assert device["by_group"] == {"7|AllReduce": {"count": 1, "busy": 30.0, "exposed": 20.0}}


def test_shares_and_overlap_are_metrics_by_rank(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": EVENTS}))
    found = device_time.measure(Evidence(read_paths([str(path)])), Policy())["device_time"]
    one = found["3"]
    assert sum(one[part] for part in device_time.PARTS) == pytest.approx(1.0)
    assert one["overlap"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", True),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclSymkDevKernel_AllGather_ST(x)", True),
        ("nvshmem_internal_put", True),
        ("void sglang::cross_device_reduce_1stage<half, 8>", True),
        ("ampere_sgemm_128x64_nn", False),
        ("hipblaslt_gemm", False),
    ],
)
def test_kernels_of_every_era_have_their_class(name: str, moves: bool) -> None:
    assert communicates(name) == moves


def test_odd_events_are_passed_over(tmp_path: Path) -> None:
    odd = [
        {"ph": "X", "cat": ["kernel"], "name": "x", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": None, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "g", "ts": "nan?", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "g", "ts": 10**40, "dur": 1},
        3,
        *EVENTS,
    ]
    device = told(tmp_path / "t.json", json.dumps({"traceEvents": odd}))["device_us"]
    assert device["compute"] >= 50.0


def test_a_cut_trace_gives_the_events_before_the_cut(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS}, indent=1)
    path = tmp_path / "t.json"
    path.write_text(text[: text.index('"ts": 90')])
    collected = read_paths([str(path)])
    assert collected.sources[0].read == "part"
    fields = json.loads(collected.rows("log_events")[0]["fields"])
    assert fields["device_us"]["compute"] == 40.0


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes_after_the_list_began_are_no_crash(tail: bytes) -> None:
    problems: list[str] = []
    data = b'{"traceEvents": [' + json.dumps(EVENTS[0]).encode() + b"," + tail
    stream = kineto_stream.Stream(from_bytes(data), problems)
    stream.head()
    assert sum(e == EVENTS[0] for e in stream.events()) >= 1


def swept(kernels: list[tuple[int, float, float]]) -> dict[str, float]:
    """An independent reckoning: what runs at every moment between two changes."""
    times = sorted({t for _, begin, end in kernels for t in (begin, end)})
    out = {"compute": 0.0, "exposed": 0.0, "memory": 0.0, "idle": 0.0, "overlapped": 0.0}
    for begin, end in itertools.pairwise(times):
        running = {kind for kind, start, stop in kernels if start <= begin and stop >= end}
        if COMPUTE in running:
            out["compute"] += end - begin
            out["overlapped"] += (end - begin) * (COMMUNICATION in running)
        elif COMMUNICATION in running:
            out["exposed"] += end - begin
        elif MEMORY in running:
            out["memory"] += end - begin
        else:
            out["idle"] += end - begin
    return out


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 20)), min_size=1))
def test_the_breakdown_agrees_with_a_sweep(found: list[tuple[int, int, int]]) -> None:
    kernels = Kernels()
    for kind, start, length in found:
        kernels.add(kind, float(start), float(length))
    device = kernels.breakdown()
    assert device is not None
    swept_ = swept([(k, float(s), float(s + n)) for k, s, n in found])
    for name, value in swept_.items():
        assert device[name] == pytest.approx(value, abs=1e-6)


def test_unions_of_nothing_and_of_touching_intervals() -> None:
    none = np.zeros(0)
    assert intervals.length(none, none) == 0.0
    one, two = np.array([0.0, 1.0]), np.array([1.0, 2.0])
    assert intervals.length(one, two) == 2.0
    assert intervals.outside((one, two), (none, none)) == 2.0


@here
def test_the_numbers_of_a_real_job_of_eight_ranks_agree_with_a_sweep() -> None:
    """DLRM on eight V100, against the events read by Python's own json and tarfile."""
    path = DATA / "dlrm_v100_8rank/dlrm_kineto.tar.gz"
    truth: dict[int, dict[str, float]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is None:
                continue
            trace = json.load(content)
            rank = trace["distributedInfo"]["rank"]
            truth[rank] = swept([
                (
                    MEMORY if e["cat"].lower() != "kernel"
                    else COMMUNICATION if e["name"].startswith("nccl") else COMPUTE,
                    float(e["ts"]),
                    float(e["ts"]) + float(e["dur"]),
                )
                for e in trace["traceEvents"]
                if str(e.get("cat")).lower() in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy",
                                                 "memset") and e.get("ph") == "X"
            ])  # fmt: skip
    collected = read_paths([str(path)])
    assert collected.world_size == 8
    assert len(truth) == 8
    for row in collected.rows("log_events"):
        device = json.loads(row["fields"])["device_us"]
        for name, value in truth[row["rank"]].items():
            assert device[name] == pytest.approx(value, abs=0.01)
        assert sum(g["count"] for g in device["by_group"].values()) == 8
    found = device_time.measure(Evidence(collected), Policy())["device_time"]
    for one in found.values():
        assert sum(one[part] for part in device_time.PARTS) == pytest.approx(1.0)


@here
def test_groups_and_worlds_of_traces_with_arguments() -> None:
    for name, world, group in (("a100_rank0of2", 2, "0|allreduce"), ("mi300x_rank0of8", 8, "0|")):
        collected = read_paths([str(DATA / f"process_groups/{name}.json.gz")])
        assert collected.world_size == world
        (row,) = collected.rows("log_events")
        groups = json.loads(row["fields"])["device_us"]["by_group"]
        assert any(key.startswith(group) for key in groups)
