"""Evaluation tells the loss of what training never saw, and leaves training as it was."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from collectors import annotate
from tests.trainer.recorder import Recorder
from trainer import progress
from trainer.config import ConfigError
from trainer.loop import Trainer
from trainer.metrics import Metrics
from trainer.model import IGNORE
from trainer.settings import load

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
TINY = (
    "train.device=cpu",
    "train.dtype=float64",
    "train.global_batch=4",
    "train.microbatch=2",
    "train.sequence=16",
    "train.steps=5",
    "model.layers=2",
    "model.width=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.mlp=48",
)
EVALUATED = ("eval.every=2", "eval.batches=3", "eval.held=0.2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_bytes(np.random.default_rng(3).integers(97, 123, 3000, dtype=np.uint8).tobytes())
    return file


def trainer(text: Path, *settings: str) -> Trainer:
    return Trainer(load([*TINY, f"data.path={text}", *settings], 1), 1, CPU)


def test_evaluation_is_the_mean_loss_of_the_held_out_samples(text: Path) -> None:
    run = trainer(text, *EVALUATED)
    results = [run.step(number) for number in range(5)]
    assert [one.evaluation is not None for one in results] == [False, True, False, True, True]
    inputs, targets = zip(
        *(run.loader.read_window(run.loader.held_window(i)) for i in range(3 * 4)), strict=True
    )
    x = torch.from_numpy(np.stack(inputs))
    with torch.no_grad():
        for part in run.built.pipeline.stages[0]:
            x = part.module(x)
    true = torch.nn.functional.cross_entropy(
        x.flatten(0, 1), torch.from_numpy(np.stack(targets)).flatten(), ignore_index=IGNORE
    )
    assert results[-1].evaluation == pytest.approx(true.item(), rel=1e-12)


def test_how_often_it_is_done_changes_nothing_of_training(text: Path) -> None:
    often, once = trainer(text, *EVALUATED), trainer(text, *EVALUATED, "eval.every=5")
    for number in range(5):
        ours, other = often.step(number), once.step(number)
        assert (ours.loss, ours.grad_norm) == (other.loss, other.grad_norm)
    assert all(part.module.training for part in often.built.pipeline.stages[0])
    assert not often.built.pipeline._inputs
    assert not often.built.pipeline._outputs


def test_it_is_told_as_its_own_phase_inside_the_step(text: Path) -> None:
    run, heard = trainer(text, *EVALUATED), Recorder()
    annotate.listen(heard)
    run.step(0)
    before = len(heard.phases)
    result = run.step(1)
    annotate.listen(None)
    names = [phase for _, phase, _, _ in heard.phases[before:]]
    assert names[:before] == [phase for _, phase, _, _ in heard.phases[:before]]
    assert set(names[before:]) == {"data", "evaluation", "communication"}
    assert names[before:].count("evaluation") == 3 * 2
    assert heard.nested == []
    assert heard.values[-1] == {"evaluation_loss": result.evaluation}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("eval.every=1", "eval.batches=10"), "38 of 187 samples and leaves 149; eval.batches x"),
        (("train.sequence=2999", "eval.every=1"), "1 of 1 samples and leaves 0"),
    ],
)
def test_too_few_samples_are_refused(text: Path, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(text, *EVALUATED, *settings)
    assert words in caught.value.problems[0]


def test_tokens_beyond_the_vocabulary_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    np.full(100, 300, dtype="<u2").tofile(tmp_path / "some.bin")
    with pytest.raises(ConfigError, match=r"token 300 in .*some\.bin .*model\.vocabulary=256"):
        trainer(tmp_path, "data.dtype=uint16")


def test_a_line_has_the_means_of_the_steps_since_the_last_one(text: Path) -> None:
    run = trainer(text, *EVALUATED)
    first, second = (run.step(number) for number in range(2))
    first, second = replace(first, seconds=1.0, tokens=60), replace(second, seconds=3.0, tokens=20)
    line = progress.line([first, second], 5)
    assert "20 tokens/s" in line
    assert "2000 ms/step" in line
    assert f"loss {second.loss:.4f}" in line
    assert f"evaluation {second.evaluation:.4f}" in line
    assert "mfu" not in line
    known = [replace(one, peak=1e9, flops=1e8) for one in (first, second)]
    assert "mfu 5.0%" in progress.line(known, 5)
    assert "mfu 10.0%" in progress.line(known[:1], 5), "from the first step on"


def test_metrics_are_json_also_when_the_numbers_are_gone(text: Path, tmp_path: Path) -> None:
    run = trainer(text, *EVALUATED)
    results = [run.step(number) for number in range(2)]
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(str(file))
    for one in (*results, replace(results[0], loss=math.nan, grad_norm=math.inf)):
        metrics.write(one)
    told = [json.loads(line) for line in file.read_text().splitlines()]
    metrics.close()
    assert [one["step"] for one in told] == [0, 1, 0]
    assert told[1]["evaluation"] == results[1].evaluation
    assert told[0]["tokens_per_s"] == pytest.approx(results[0].tokens / results[0].seconds)
    assert told[0]["mfu"] is None
    assert told[2]["loss"] is told[2]["grad_norm"] is None
    with pytest.raises(ConfigError, match=r"cannot write log\.metrics=.*: No such file"):
        Metrics(str(tmp_path / "absent" / "m.jsonl"))


def test_metrics_of_a_resumed_run_have_every_step_once(text: Path, tmp_path: Path) -> None:
    run, file = trainer(text, *EVALUATED), tmp_path / "metrics.jsonl"
    results = [run.step(number) for number in range(5)]

    def told(begin: int, steps: list[int]) -> list[int]:
        metrics = Metrics(str(file))
        metrics.begin(begin)
        for number in steps:
            metrics.write(results[number])
        metrics.close()
        return [json.loads(line)["step"] for line in file.read_text().splitlines()]

    assert told(0, [0, 1, 2, 3]) == [0, 1, 2, 3]
    with file.open("a") as torn:
        torn.write('{"step": 4, "lo')
    assert told(2, [2, 3, 4]) == [0, 1, 2, 3, 4]
    assert told(5, []) == [0, 1, 2, 3, 4]
    assert told(0, [0]) == [0], "a run from the start begins the file anew"
    file.write_text("no metrics of ours\n")
    assert told(3, [3]) == [3]


@pytest.mark.ranks
def test_the_line_is_right_on_rank_0_where_the_last_stage_is_elsewhere(
    text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "m.jsonl"
    settings = [*TINY, f"data.path={text}", *EVALUATED, f"log.metrics={file}", "train.steps=2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "trainer", *settings, "parallel.pp=2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    alone = trainer(text, *EVALUATED, "train.steps=2")
    true = [alone.step(number) for number in range(2)]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    for line, one in zip(lines, true, strict=True):
        assert f"loss {one.loss:.4f}" in line
        assert "mfu" not in line
    assert f"evaluation {true[1].evaluation:.4f}" in lines[1]
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [len(one["memory"]) for one in told] == [2, 2]
    assert told[1]["loss"] == pytest.approx(true[1].loss, rel=1e-10)
    assert told[1]["evaluation"] == pytest.approx(true[1].evaluation, rel=1e-10)
