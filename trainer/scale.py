"""The dynamic loss scale of float16 (Micikevicius et al. 2018, arXiv:1710.03740).

In: after each step, whether the gradients of all ranks were finite. Out: `value`, by which the loss
is multiplied before backward, and `unscale`, which takes it out of the gradients again, before
anything looks at them. Every rank is told the same and so holds the same scale.
Where it is off (every dtype but float16) the value is 1 and stays so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from trainer.config import ScaleConfig


class LossScale:
    """The factor, and what it has seen."""

    def __init__(self, config: ScaleConfig, *, on: bool) -> None:
        self.config = config
        self.on = on
        self.value = config.initial if on else 1.0
        self.good = 0
        """Good steps since the factor last changed."""
        self.skipped = 0
        """Steps that were skipped since the start of training."""

    def unscale(self, pieces: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the factor; once a step, before the norm and before clipping."""
        if self.on:
            for p in pieces:
                if p.grad is not None:
                    p.grad.div_(self.value)

    def overflowed(self, pieces: Iterable[nn.Parameter]) -> bool:
        """Whether any gradient that this rank holds isn't finite, be it counted here or not."""
        if not self.on:
            return False
        gradients = [p.grad for p in pieces if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))
        return not bool(norm.isfinite())

    def update(self, *, finite: bool) -> None:
        """A step ended; raises FloatingPointError where it overflowed at the least factor."""
        if not self.on:
            return
        config = self.config
        if finite:
            self.good += 1
            if self.good >= config.interval:
                self.value *= config.growth
                self.good = 0
            return
        if self.value <= config.least:
            raise FloatingPointError(
                f"gradients are not finite although the loss scale is at its least, "
                f"{self.value:g} (scale.least), after {self.skipped} skipped steps: "
                f"train.dtype=bfloat16 has the range of float32"
            )
        self.skipped += 1
        self.good = 0
        self.value = max(config.least, self.value * config.backoff)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold for the run to go on as if it had not ended."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from `state`; a run without a scale keeps 1, but its learning rate the steps."""
        self.skipped = int(state["skipped"])
        if self.on:
            self.value = float(state["value"])
            self.good = int(state["good"])
