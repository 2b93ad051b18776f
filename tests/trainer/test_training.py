"""One process trains on real text, says what it does, and its faults are real."""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from collectors import annotate
from tests.trainer.recorder import Recorder
from trainer import banner, faults, progress
from trainer.config import FaultConfig
from trainer.faults import slow
from trainer.loop import Trainer
from trainer.settings import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.loop import StepResult

CPU = torch.device("cpu")
TINY = (
    "train.device=cpu",
    "train.global_batch=8",
    "train.microbatch=4",
    "train.sequence=32",
    "model.layers=2",
    "model.width=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.mlp=128",
)


def trainer(*settings: str) -> Trainer:
    return Trainer(load([*TINY, *settings], 1), 1, CPU)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    heard = Recorder()
    annotate.listen(heard)
    yield heard
    annotate.listen(None)


@pytest.mark.parametrize(
    "how",
    [
        ("train.dtype=float32",),
        ("train.dtype=bfloat16",),
        ("train.dtype=float16",),
        ("memory.offload=optimizer",),
        ("parallel.zero=3", "memory.offload=parameters", "train.dtype=bfloat16"),
    ],
    ids=["float32", "bfloat16", "float16", "update on host", "shares on host, bfloat16"],
)
def test_loss_falls_on_the_standard_library(how: tuple[str, ...]) -> None:
    run = trainer("train.steps=40", *how)
    losses = [run.step(number).loss for number in range(40)]
    assert losses[0] == pytest.approx(5.55, abs=0.15)
    assert sum(losses[-5:]) / 5 < 3.6


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    def first_steps(*settings: str) -> list[tuple[float, float]]:
        run = trainer("train.steps=3", *settings)
        return [(r.loss, r.grad_norm) for r in (run.step(number) for number in range(3))]

    assert first_steps() == first_steps()
    assert first_steps() != first_steps("train.seed=1")


def test_a_step_tells_its_phases_in_order_and_its_numbers(recorder: Recorder) -> None:
    run = trainer("train.steps=2")
    results = [run.step(number) for number in range(2)]
    assert recorder.steps == [0, 1]
    assert recorder.nested == []
    told = [(phase, microbatch) for step, phase, microbatch, _ in recorder.phases if step == 1]
    assert told == [
        ("data", None),
        ("communication", None),
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("communication", None),
        ("communication", None),
        ("optimizer", None),
    ]
    assert recorder.values == [
        {"loss": r.loss, "grad_norm": r.grad_norm, "tokens": float(r.tokens)} for r in results
    ]


def test_the_banner_says_what_is_on_and_off() -> None:
    run = trainer("train.steps=1", "optim.clip=0")
    text = banner.banner(run, [run.built.whole])
    assert "pp1 x dp1 x tp1, 1 rank(s)" in text
    assert f"{run.built.whole:,} in all" in text
    assert "256 tokens a step, 2 microbatch(es) of 4 a rank" in text
    assert "cpu, float32, backend none" in text
    assert "off: optim.clip=0" in text
    result: StepResult = run.step(0)
    line = progress.line([result], 1)
    assert f"loss {result.loss:.4f}" in line
    assert "step 0/0" in line
    assert "bubble" not in line, "there is no pipeline"
    piped = [replace(result, bubble=share, predicted_bubble=0.25) for share in (0.26, 0.28)]
    assert "bubble 27% (predicted 25%)" in progress.line(piped, 1)
    assert progress.ending(result, result, 1.25).startswith("finished 1 steps in 1.2 s, loss 5.")


def test_only_the_rank_that_is_named_has_the_fault() -> None:
    for kind in ("rank-dies", "rank-stalls", "collective-mismatch", "straggler", "oom"):
        config = FaultConfig(kind=kind, rank=1)
        assert type(faults.make(config, 0, CPU)) is faults.Fault
        assert type(faults.make(config, 1, CPU)) is not faults.Fault
    assert type(faults.make(FaultConfig(), 0, CPU)) is faults.Fault


def test_out_of_memory_is_torchs_own_error_in_the_step_that_is_named() -> None:
    run = trainer("train.steps=3", "faults.kind=oom", "faults.step=1")
    run.step(0)
    with pytest.raises(RuntimeError, match=r"can't allocate memory: you tried to allocate"):
        run.step(1)


def test_a_stall_blocks_in_reading_and_gives_the_true_bytes_in_the_end() -> None:
    healthy = trainer("train.steps=2")
    stalled = trainer(
        "train.steps=2", "faults.kind=rank-stalls", "faults.step=1", "faults.seconds=0.5"
    )
    for number in range(2):
        before = time.perf_counter()
        ours = stalled.step(number)
        took = time.perf_counter() - before
        assert ours.loss == healthy.step(number).loss
    assert took > 0.5


def test_a_dying_rank_kills_itself_inside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int, int]] = []
    run = trainer("train.steps=3", "faults.kind=rank-dies", "faults.step=1")
    monkeypatch.setattr(
        os, "kill", lambda pid, number: sent.append((run.built.fault.step, pid, number))
    )
    for number in range(3):
        run.step(number)
    assert sent == [(1, os.getpid(), signal.SIGKILL)]


def test_a_straggler_computes_in_every_forward_and_backward_from_its_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0.0, 0.01)
    monkeypatch.setattr(slow.time, "perf_counter", lambda: next(clock))
    fault = faults.make(FaultConfig(kind="straggler", step=1, seconds=0.05), 0, CPU)
    run = trainer("train.steps=1")
    looks = []
    for step in range(3):
        fault.begin(step, run.loader)
        before = next(clock)
        fault.in_forward(0)
        fault.in_backward(0)
        looks.append(round((next(clock) - before) / 0.01) - 1)
    assert looks[0] == 0
    assert min(looks[1:]) >= 2 * 5


def test_a_mismatch_changes_the_shape_of_one_sum() -> None:
    fault = faults.make(FaultConfig(kind="collective-mismatch", step=1), 0, CPU)
    run = trainer("train.steps=1")
    values = torch.zeros(6)
    shapes = []
    for step in range(3):
        fault.begin(step, run.loader)
        shapes.append(fault.reduced(values).shape[0])
    assert shapes == [6, 12, 6]
