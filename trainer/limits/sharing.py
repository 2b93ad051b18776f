"""Which forms of ZeRO, of replicas of its shards, and of offload a layout allows; no torch.

In: a Config and the Layout with dp filled in. Out: a line for each reason why not, with the flag
that changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.layout import Layout


def setting_problems(config: Config) -> list[str]:
    """What no layout can mend."""
    zero, copies = config.parallel.zero, config.parallel.replicate
    found = []
    if config.memory.offload == "parameters" and zero < 3:
        found.append(
            f"memory.offload=parameters fetches a layer's parameters when it needs them, which "
            f"parallel.zero={zero} does not (parallel.zero=3 or memory.offload=optimizer)"
        )
    if copies > 1 and not zero:
        found.append(
            f"parallel.replicate={copies} copies what zero shares, and parallel.zero=0 shares "
            f"nothing (parallel.replicate=1 or parallel.zero=1)"
        )
    return found


def problems(config: Config, layout: Layout) -> list[str]:
    """Whether there is anybody to share with."""
    zero = config.parallel.zero
    if zero and layout.dp * layout.cp == 1 and config.memory.offload != "parameters":
        return [
            (
                f"parallel.zero={zero} shares over replicas (dp and cp), and there is one "
                f"(parallel.zero=0, or fewer tp x pp)"
            )
        ]
    return []


def replicate_problems(config: Config, layout: Layout) -> list[str]:
    """Whether this many replicas of the shares leave each of them ranks to share."""
    copies, data = config.parallel.replicate, layout.dp * layout.cp
    if copies == 1 or not config.parallel.zero or not data:
        return []
    if data % copies or data == copies:
        fitting = [n for n in range(1, data) if data % n == 0] or [1]
        nearest = min(fitting, key=lambda one: abs(one - copies))
        return [
            (
                f"parallel.replicate={copies} must leave at least 2 of dp x cp = {data} ranks to "
                f"each group that shares, and divide them (parallel.replicate={nearest})"
            )
        ]
    if data % (copies * layout.ep):
        return [
            (
                f"parallel.replicate={copies} does not divide the dp x cp / ep = "
                f"{data} / {layout.ep} ranks that hold the same experts "
                f"(parallel.replicate=1 or parallel.ep=1)"
            )
        ]
    return []
