"""The seams at which a fault can break a run; without a fault every call does what is right.

The trainer calls them on every rank; a kind of fault overrides those that it breaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trainer.config import FaultConfig
    from trainer.data import Loader
    from trainer.loop import StepResult, Trainer
    from trainer.mesh import Mesh


class Fault:
    """No fault; the kinds override what they break."""

    def __init__(self, config: FaultConfig) -> None:
        self.at = config.step
        self.seconds = config.seconds
        self.step = -1
        """The step that runs now."""

    @property
    def due(self) -> bool:
        """Whether this is the step at which it goes wrong."""
        return self.step == self.at

    @property
    def lasts(self) -> bool:
        """Whether that step was reached, for what stays wrong from there on."""
        return self.step >= self.at

    def install(self, trainer: Trainer) -> None:
        """The trainer is complete; no step has run."""

    def goes_on(self, step: int) -> bool:  # noqa: ARG002 (UnevenInputs uses it)
        """Whether this rank still has a batch for `step`."""
        return True

    def around(self, run: Callable[[int], StepResult], step: int) -> StepResult | None:
        """Run the step; None where its result is lost."""
        return run(step)

    def begin(self, step: int, loader: Loader) -> None:  # noqa: ARG002 (RankStalls uses it)
        """A step begins; its data is not loaded yet."""
        self.step = step

    def in_forward(self, microbatch: int) -> None:
        """Called in every forward, before the model runs."""

    def in_backward(self, microbatch: int) -> None:
        """Called in every backward, before the model runs."""

    def divisor(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the summed loss is divided by before backward."""
        return tokens

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        """What this rank brings to the sum over the world."""
        return values

    def over_world(self, values: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """The sum over the world of what every rank brings."""
        values = self.reduced(values)
        mesh.sum_over_world(values)
        return values
