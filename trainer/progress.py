"""How a run goes, in lines: a step now and then, and the end.

Pure: results in, text out; `__main__` prints, on rank 0 only. Loss, gradient norm and memory are
the same on every rank (the loop has summed them over the world), so any rank can print for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.loop import StepResult

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def line(since: Sequence[StepResult], steps: int) -> str:
    """The last of `since` in one line; rates are means over all of them, evaluation apart."""
    result = since[-1]
    seconds = sum(one.seconds for one in since)
    share = utilisation(since)
    told = [
        f"step {result.step:>{len(str(steps - 1))}}/{steps - 1}",
        f"loss {result.loss:.4f}",
        *([] if result.evaluation is None else [f"evaluation {result.evaluation:.4f}"]),
        f"grad norm {result.grad_norm:.3f}",
        f"lr {result.lr:.2e}",
        f"{sum(one.tokens for one in since) / seconds:,.0f} tokens/s",
        *([] if share is None else [f"mfu {share:.1%}"]),
        f"{seconds / len(since) * 1e3:.0f} ms/step",
        *_bubble(since),
        f"memory a rank {_memory(result)}",
        *([_load(result)] if result.load else []),
        *([] if result.loss_scale is None else [_scale(result)]),
    ]
    return "  ".join(told)


def utilisation(since: Sequence[StepResult]) -> float | None:
    """Model FLOPs of these steps over what the GPUs could have done; None where not known."""
    done = [one.flops for one in since if one.flops is not None]
    could = [one.peak * one.seconds for one in since if one.peak is not None]
    return sum(done) / sum(could) if len(done) == len(could) == len(since) else None


def ending(first: StepResult, last: StepResult, seconds: float) -> str:
    """The last line of a run that went to its end."""
    return (
        f"finished {last.step - first.step + 1} steps in {seconds:.1f} s, "
        f"loss {first.loss:.4f} -> {last.loss:.4f}"
    )


def human(size: int) -> str:
    """Bytes with three digits and a unit."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def _bubble(since: Sequence[StepResult]) -> list[str]:
    """The share of time in which pipeline ranks idled, in the mean; nothing without a pipeline."""
    seen = [one.bubble for one in since if one.bubble is not None]
    if not seen:
        return []
    return [f"bubble {sum(seen) / len(seen):.0%} (predicted {since[-1].predicted_bubble:.0%})"]


def _load(result: StepResult) -> str:
    peak = max(one.peak for one in result.load)
    dropped = sum(one.dropped for one in result.load) / len(result.load)
    return f"expert load {peak:.1f}x" + (f", {dropped:.1%} dropped" if dropped else "")


def _scale(result: StepResult) -> str:
    skipped = f", {result.skipped} step(s) skipped" if result.skipped else ""
    return f"loss scale {result.loss_scale:g}{skipped}"


def _memory(result: StepResult) -> str:
    low, high = human(min(result.memory)), human(max(result.memory))
    return low if low == high else f"{low} to {high}"
