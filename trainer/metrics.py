"""What a run tells to machines: one JSON object a step, a line each, from rank 0.

In: StepResults. Out: lines with step, loss, grad_norm, lr, tokens, seconds, tokens_per_s, mfu,
loss_scale, bubble (share of the time of pipeline ranks), memory (bytes, by rank), experts (by layer
that has some: each expert's share of all choices, and the share dropped) and evaluation (nats a
token of held-out samples). null is what is not known or not due, or no finite number (JSON has
none): a loss of null has left the numbers.
A run that resumes goes on in its file, which has every step once.
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
        """ConfigError where the file cannot be written."""
        try:
            self._file = Path(path).open("a+b")  # noqa: SIM115 (as long as a run)
        except OSError as error:
            raise ConfigError([f"cannot write log.metrics={path}: {error.strerror}"]) from error

    def begin(self, step: int) -> None:
        """Go on with `step`, after the lines of the steps before it; others are cut off.

        They are what a run did after the checkpoint that this one resumes from, or another run.
        """
        self._file.seek(0)
        known = 0
        for line in self._file:
            if _step(line) not in range(step):
                break
            known += len(line)
        self._file.truncate(known)

    def write(self, result: StepResult) -> None:
        """Add a step."""
        text = json.dumps(_record(result), allow_nan=False) + "\n"
        self._file.write(text.encode())
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
        "experts": [{"shares": one.shares, "dropped": one.dropped} for one in result.load],
        "evaluation": _finite(result.evaluation),
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _step(line: bytes) -> int | None:
    """The step of a line; None where it is none of ours, such as one that a crash has cut off."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    step = told.get("step") if isinstance(told, dict) else None
    return step if isinstance(step, int) and line.endswith(b"\n") else None
