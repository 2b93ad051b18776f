"""The learning rate: a pure function of the step and the settings, so that a resume needs no state.

In: a step and the Config. Out: the rate of that step's update. Warm-up first, linear to the peak;
then the schedule takes over. The peak follows the batch where optim.base_batch says for which batch
optim.lr was found: lr x global_batch / base_batch (Goyal et al. 2017, arXiv:1706.02677).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config, OptimConfig


def learning_rate(step: int, config: Config) -> float:
    """Of the update of `step`, from 0."""
    optim = config.optim
    if step < optim.warmup:
        return peak(config) * (step + 1) / optim.warmup
    return peak(config) * _SCHEDULES[optim.schedule](step, config.train.steps, optim)


def peak(config: Config) -> float:
    """What warm-up ends at."""
    base = config.optim.base_batch
    return config.optim.lr * (config.train.global_batch / base if base else 1.0)


def _constant(_step: int, _steps: int, _optim: OptimConfig) -> float:
    return 1.0


def _linear(step: int, steps: int, optim: OptimConfig) -> float:
    """Straight to lr_final at the last step."""
    return _between(1 - _progress(step, steps, optim), optim)


def _cosine(step: int, steps: int, optim: OptimConfig) -> float:
    """Half a cosine to lr_final at the last step (Loshchilov & Hutter 2016, arXiv:1608.03983)."""
    return _between(0.5 * (1 + math.cos(math.pi * _progress(step, steps, optim))), optim)


def _warmup_stable_decay(step: int, steps: int, optim: OptimConfig) -> float:
    """The peak, then straight to lr_final over the last share of steps (arXiv:2404.06395)."""
    start = max(optim.warmup, steps - max(1, round(optim.decay * steps)))
    gone = min(1.0, max(0, step + 1 - start) / max(1, steps - start))
    return _between(1 - gone, optim)


def _inverse_sqrt(step: int, _steps: int, optim: OptimConfig) -> float:
    """1 / sqrt(step), from the peak after warm-up (Vaswani et al. 2017, arXiv:1706.03762)."""
    return math.sqrt(max(1, optim.warmup) / (step + 1))


_SCHEDULES = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _warmup_stable_decay,
    "inverse-sqrt": _inverse_sqrt,
}


def _progress(step: int, steps: int, optim: OptimConfig) -> float:
    """From 0 at the end of warm-up to 1 at the last step."""
    return min(1.0, (step - optim.warmup) / max(1, steps - 1 - optim.warmup))


def _between(share: float, optim: OptimConfig) -> float:
    """1 at share 1, lr_final at share 0."""
    return optim.lr_final + (1 - optim.lr_final) * share
