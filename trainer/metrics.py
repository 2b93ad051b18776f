"""What a run tells to machines: one JSON object a step, a line each, from rank 0.

In: StepResults. Out: lines with step, loss, grad_norm, lr, tokens, seconds, tokens_per_s, mfu,
loss_scale, bubble (share of the time of pipeline ranks), memory (bytes, by rank) and evaluation
(nats a token of held-out samples). null is what is not known or not due, or no finite number (JSON
has none): a loss of null has left the numbers.
A run that resumes adds to its file: of two lines with the same step the later one counts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import ConfigError
from trainer.progress import utilisation

if TYPE_CHECKING:
    from trainer.loop import StepResult


class Metrics:
    """An open file; every line is there once `write` returns, whatever happens to the run."""

    def __init__(self, path: str) -> None:
        """Adds to the file; ConfigError where it cannot be written."""
        try:
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (as long as a run)
        except OSError as error:
            raise ConfigError([f"cannot write log.metrics={path}: {error.strerror}"]) from error

    def begin(self) -> None:
        """Forget what an earlier run wrote."""
        self._file.truncate(0)

    def write(self, result: StepResult) -> None:
        """Add a step."""
        self._file.write(json.dumps(_record(result), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """The run has ended."""
        self._file.close()


def _record(result: StepResult) -> dict[str, Any]:
    return {
        "step": result.step,
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "lr": result.lr,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens / result.seconds,
        "mfu": utilisation([result]),
        "loss_scale": result.loss_scale,
        "bubble": result.bubble,
        "memory": list(result.memory),
        "evaluation": _finite(result.evaluation),
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
