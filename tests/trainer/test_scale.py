"""float16 trains: overflow is skipped, the scale moves as told, and what it does is seen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from collectors import annotate
from tests.trainer.recorder import Recorder
from tests.trainer.test_training import TINY
from trainer import banner, progress
from trainer.config import ScaleConfig
from trainer.loop import Trainer
from trainer.scale import LossScale
from trainer.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
HALF = (*TINY, "train.dtype=float16", "train.global_batch=4", "train.steps=12")


def pieces(*values: float) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(3)) for _ in values]
    for p, value in zip(made, values, strict=True):
        p.grad = torch.tensor([1.0, value, 2.0])
    return made


def test_the_scale_grows_after_good_steps_in_a_row_and_falls_at_once() -> None:
    scale = LossScale(ScaleConfig(initial=8.0, interval=3, growth=4.0, backoff=0.5), on=True)
    seen = []
    for finite in (True, True, False, True, True, True, True, False, False):
        scale.update(finite=finite)
        seen.append(scale.value)
    assert seen == [8, 8, 4, 4, 4, 16, 16, 8, 4]
    assert scale.skipped == 3


def test_it_goes_on_from_its_state() -> None:
    config = ScaleConfig(initial=8.0, interval=3)
    first = LossScale(config, on=True)
    for finite in (False, True, True):
        first.update(finite=finite)
    second = LossScale(config, on=True)
    second.load_state_dict(first.state_dict())
    for scale in (first, second):
        scale.update(finite=True)
    assert (second.value, second.good, second.skipped) == (8.0, 0, 1)
    assert second.state_dict() == first.state_dict()
    without = LossScale(config, on=False)
    without.load_state_dict(first.state_dict())
    assert (without.value, without.skipped) == (1.0, 1), "the learning rate goes on, the scale not"


def test_an_overflow_at_the_least_scale_ends_the_run_instead_of_skipping_for_ever() -> None:
    scale = LossScale(ScaleConfig(initial=2.0, least=1.0), on=True)
    scale.update(finite=False)
    with pytest.raises(FloatingPointError, match=r"scale\.least.*train\.dtype=bfloat16"):
        scale.update(finite=False)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_element_that_is_not_finite_is_seen(bad: float) -> None:
    scale = LossScale(ScaleConfig(), on=True)
    assert not scale.overflowed(pieces(1.0, 65504.0))
    assert scale.overflowed(pieces(1.0, bad))
    assert not LossScale(ScaleConfig(), on=False).overflowed(pieces(bad))


def test_gradients_are_unscaled() -> None:
    scale = LossScale(ScaleConfig(initial=4.0), on=True)
    (p,) = pieces(8.0)
    scale.unscale([p])
    assert p.grad is not None
    assert p.grad.tolist() == [0.25, 2.0, 0.5]


def state(run: Trainer) -> list[torch.Tensor]:
    """All that an update changes."""
    moments = [one for kept in run.optimizer.state.values() for one in kept.values()]
    return [one.detach().clone() for one in (*run.built.pieces.values(), *moments)]


def spoil(run: Trainer, step: int) -> Callable[[], None]:
    """A gradient that is infinite in one step, after all sums."""
    real = run.built.partial.finish

    def finish() -> None:
        real()
        if run.built.fault.step == step:
            last = list(run.built.pieces.values())[-1]
            assert last.grad is not None
            last.grad.view(-1)[-1] = math.inf

    return finish


def test_a_skipped_step_changes_nothing_but_the_scale_and_takes_no_learning_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, heard = Trainer(load(list(HALF), 1), 1, CPU), Recorder()
    monkeypatch.setattr(run.built.partial, "finish", spoil(run, 2))
    annotate.listen(heard)
    try:
        results = [run.step(number) for number in range(2)]
        before = state(run)
        results.append(run.step(2))
        assert all(map(torch.equal, before, state(run)))
        results.append(run.step(3))
    finally:
        annotate.listen(None)
    assert not all(map(torch.equal, before, state(run)))
    assert [one.loss_scale for one in results] == [65536.0] * 3 + [32768.0]
    assert [one.skipped for one in results] == [0, 0, 1, 1]
    assert results[3].lr == results[2].lr, "a step that did not happen used up no warm-up"
    assert [one["loss_scale"] for one in heard.values] == [65536.0] * 3 + [32768.0]
    assert heard.values[3]["skipped_steps"] == 1.0
    line = progress.line([results[3]], 12)
    assert "loss scale 32768, 1 step(s) skipped" in line
    text = banner.banner(run, [run.built.whole])
    assert "float16 products, float32 weights (autocast)" in text
    assert "65536, x 2 after 2000 good steps, x 0.5 and no update after an overflow" in text


def test_a_scale_far_too_large_comes_down_by_itself() -> None:
    settings = ("scale.initial=1e12", "scale.backoff=0.001")
    run = Trainer(load([*HALF, *settings], 1), 1, CPU)
    results = [run.step(number) for number in range(6)]
    assert 0 < results[-1].skipped < 5
    assert math.isfinite(results[-1].grad_norm)
    assert results[-1].loss < results[0].loss


def test_without_float16_nothing_is_said_of_a_scale() -> None:
    run = Trainer(load([*TINY, "train.steps=1"], 1), 1, CPU)
    result = run.step(0)
    assert result.loss_scale is None
    assert "scale" not in progress.line([result], 1)
    assert "none: float32 has the range" in banner.banner(run, [run.built.whole])
