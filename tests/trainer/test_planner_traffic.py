"""Bytes a step by axis are what the docstrings of `trainer/parallel/` count, and what is quoted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer import flops
from trainer.planner.candidate import NUMBERS, Candidate, Job
from trainer.planner.cluster import GPUS, Cluster
from trainer.planner.communication import sent_by_axis, traffic
from trainer.planner.presets import PRESETS
from trainer.planner.sources import from_trainer
from trainer.settings import read

if TYPE_CHECKING:
    from trainer.config import ModelConfig

SMALL = ["train.dtype=float32", "train.global_batch=16", "train.microbatch=2", "train.sequence=64"]


def _planned(*settings: str, gpus: int) -> tuple[Job, Candidate]:
    config = read([*SMALL, *settings])
    shape, numbers, one = from_trainer(config, "small")
    cluster = Cluster(GPUS["h100"], gpus)
    return Job(shape, cluster, config.train.sequence, config.train.global_batch, numbers), one


def test_175b_sends_9_7_gb_through_tp_a_forward() -> None:
    """Two all-reduces a layer of s b h half-precision values: 96 x 2 x 2048 x 12288 x 2 bytes."""
    job = Job(PRESETS["gpt3-175b"], Cluster(GPUS["a100"], 8), 2048, 1)
    entries = traffic(job, Candidate(tp=8), 0)
    forward = sum(e.payload * e.calls for e in entries if e.axis == "tp" and e.what == "outputs")
    assert forward == 96 * 2 * 2048 * 12288 * 2
    assert round(forward / 1e9, 1) == 9.7


def test_ddp_all_reduces_every_gradient_once_a_step() -> None:
    job, one = _planned("parallel.dp=4", gpus=4)
    assert sent_by_axis(job, one)["dp"] == pytest.approx(2 * 3 / 4 * job.shape.parameters * 4)


@pytest.mark.parametrize(("zero", "times"), [(1, 1 + 1), (2, 2 + 1), (3, 3 * 2)])
def test_zero_scatters_and_gathers(zero: int, times: int) -> None:
    """1: gradients once, parameters once; 2: gradients after each of 2 backwards; 3: parameters
    for forward and for backward, and gradients, of each of 2 microbatches."""
    job, one = _planned("parallel.dp=4", f"parallel.zero={zero}", gpus=4)
    expected = times * 3 / 4 * job.shape.parameters * 4
    assert sent_by_axis(job, one)["dp"] == pytest.approx(expected)


@pytest.mark.parametrize("form", ["ring", "all-gather"])
@pytest.mark.parametrize("n", [2, 4])
def test_context_parallelism(form: str, n: int) -> None:
    """`trainer/parallel/context.py`: b the bytes of own keys and values, w as many in float32."""
    job, one = _planned(f"parallel.cp={n}", f"parallel.cp_form={form}", "parallel.dp=1", gpus=n)
    b = w = 2 * 2 * 4 * (64 / n) * 16 * 4
    layer = {"all-gather": 2 * (n - 1) * b, "ring": 2 * (n - 1) * b + n * w}[form]
    assert sent_by_axis(job, one)["cp"] == pytest.approx(layer * 4 * 8)


def test_expert_parallelism() -> None:
    """`trainer/parallel/expert.py`: 4 x r x width x itemsize, and the counts of rows before."""
    settings = ("model.experts=8", "model.top_k=2", "parallel.ep=4", "parallel.dp=4")
    job, one = _planned(*settings, gpus=4)
    r = 2 * 64 * 2 * (1 - 1 / 4)
    assert sent_by_axis(job, one)["ep"] == pytest.approx((4 * r * 128 * 4 + 8 * 8) * 4 * 2)


def test_pipeline_sends_the_stream_and_its_gradient() -> None:
    job, one = _planned("parallel.pp=4", "parallel.dp=1", gpus=4)
    assert sent_by_axis(job, one)["pp"] == 2 * (2 * 64 * 128 * 4) * 8


def test_sequence_parallelism_sends_no_more_than_tensor_parallelism() -> None:
    """A reduce-scatter and an all-gather are an all-reduce; only the norms' gradients are more."""
    plain, one = _planned("parallel.tp=2", "parallel.dp=1", gpus=2)
    job, sp = _planned("parallel.tp=2", "parallel.dp=1", "parallel.sp=true", gpus=2)
    without = sent_by_axis(plain, one)["tp"]
    norms = (2 * 4 + 1) * 128 * 4
    assert sent_by_axis(job, sp)["tp"] == pytest.approx(without + norms)


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        ((), {"all_reduce": 4_724_736}),
        (
            ("parallel.sp=true", "memory.checkpoint=full"),
            {"all_gather": 3_407_872, "reduce_scatter": 2_883_584, "all_reduce": 10_752},
        ),
    ],
)
def test_tensor_parallelism_as_counted_in_a_run(
    settings: tuple[str, ...], counted: dict[str, int]
) -> None:
    """Bytes that `trainer.mesh.Axis` was given in one step on 2 gloo ranks, without clipping."""
    more = ("parallel.tp=2", "parallel.dp=1", "train.global_batch=8", *settings)
    job, one = _planned(*more, gpus=2)
    sums: dict[str, float] = {}
    for entry in traffic(job, one, 0):
        sums[entry.op] = sums.get(entry.op, 0) + entry.sent
    assert sums == pytest.approx(counted)


def test_flops_are_those_of_the_trainers_mfu() -> None:
    for settings in ((), ("model.experts=8", "model.top_k=2")):
        model: ModelConfig = read([*SMALL, *settings]).model
        job, _ = _planned(*settings, gpus=1)
        pairs = 64 * 65 // 2
        assert flops.of_step(model, 64, pairs) == pytest.approx(job.shape.flops(64) * 64)


def test_numbers_of_every_precision_are_whole() -> None:
    assert {one.states for name, one in NUMBERS.items() if name != "trainer-fp64"} == {16}
