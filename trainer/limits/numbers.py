"""Which dtypes and loss scales can work together; no torch.

In: a Config. Out: a line for each reason why not, with the flag that changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config


def problems(config: Config) -> list[str]:
    """Every reason why these numbers cannot work."""
    train, scale = config.train, config.scale
    found = []
    if train.reduce_dtype == "float16" and train.dtype != "float16":
        found.append(
            f"train.reduce_dtype=float16 needs a loss scale to keep sums in its range, and "
            f"train.dtype={train.dtype} has none "
            f"(train.reduce_dtype=bfloat16 or train.dtype=float16)"
        )
    if scale.growth <= 1:
        found.append(f"scale.growth={scale.growth:g} must be more than 1 (scale.growth=2)")
    if scale.least > scale.initial:
        found.append(
            f"scale.least={scale.least:g} exceeds scale.initial={scale.initial:g} "
            f"(scale.least={scale.initial:g})"
        )
    return found
