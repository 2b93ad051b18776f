"""The learning rate is a function of the step alone, and ends where the settings say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.config import Config, OptimConfig, TrainConfig
from trainer.rate import learning_rate

SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse-sqrt")


def config(steps: int, optim: OptimConfig, global_batch: int = 16) -> Config:
    return Config(train=TrainConfig(steps=steps, global_batch=global_batch), optim=optim)


def rates(steps: int, optim: OptimConfig) -> list[float]:
    return [learning_rate(step, config(steps, optim)) for step in range(steps)]


def test_learning_rate_warms_up_and_ends_at_its_share() -> None:
    optim = OptimConfig(lr=2.0, lr_final=0.25, warmup=4)
    found = rates(20, optim)
    assert found[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[-1] == pytest.approx(0.5)
    half = config(21, OptimConfig(lr=2.0, lr_final=0.0, warmup=4))
    assert learning_rate(4 + 15 // 2 + 1, half) == pytest.approx(1.0)
    assert learning_rate(0, config(1, optim)) == 0.5


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_alike_and_never_rises_again(name: str) -> None:
    found = rates(30, OptimConfig(lr=1.0, lr_final=0.1, warmup=5, schedule=name))
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[4:] == sorted(found[4:], reverse=True)
    last = {"constant": 1.0, "inverse-sqrt": (5 / 30) ** 0.5}.get(name, 0.1)
    assert found[-1] == pytest.approx(last)


def test_each_schedule_has_its_shape() -> None:
    optim = OptimConfig(lr=1.0, lr_final=0.0, warmup=0, decay=0.25)
    linear = rates(5, replace(optim, schedule="linear"))
    assert linear == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    wsd = rates(16, replace(optim, schedule="wsd"))
    assert wsd == pytest.approx([1.0] * 12 + [0.75, 0.5, 0.25, 0.0])
    root = rates(16, replace(optim, schedule="inverse-sqrt"))
    assert [root[0], root[3], root[15]] == pytest.approx([1.0, 0.5, 0.25])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3, 50])
def test_no_length_of_run_or_warmup_breaks_a_schedule(name: str, warmup: int) -> None:
    for steps in (1, 2, 4):
        optim = OptimConfig(lr=1.0, warmup=warmup, schedule=name)
        later = [learning_rate(step, config(steps, optim)) for step in range(steps + 60)]
        assert all(0 < one <= 1 for one in later), "also beyond the last step, after a resume"


def test_the_peak_follows_the_batch() -> None:
    optim = OptimConfig(lr=1.0, warmup=0, schedule="constant", base_batch=16)
    found = [learning_rate(0, config(4, optim, batch)) for batch in (8, 16, 64)]
    assert found == [0.5, 1.0, 4.0]
    assert learning_rate(0, config(4, replace(optim, base_batch=0), 64)) == 1.0
