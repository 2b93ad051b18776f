"""Which forms of ZeRO, of replicas of its shards, and of offload a layout allows; no torch.

In: a Config and the Layout with dp filled in. Out: a line for each reason why not, with the flag
that changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.layout import Layout


def problems(config: Config, layout: Layout) -> list[str]:
    """Every reason why replicas cannot share as asked."""
    zero, copies = config.parallel.zero, config.parallel.replicate
    offload = config.memory.offload
    data = layout.dp * layout.cp
    found = []
    if offload == "parameters" and zero < 3:
        found.append(
            f"memory.offload=parameters fetches a layer's parameters when it needs them, which "
            f"parallel.zero={zero} does not (parallel.zero=3 or memory.offload=optimizer)"
        )
    if zero and data == 1 and offload != "parameters":
        found.append(
            f"parallel.zero={zero} shares over replicas (dp and cp), and there is one "
            f"(parallel.zero=0, or fewer tp x pp)"
        )
    if copies > 1 and not zero:
        found.append(
            f"parallel.replicate={copies} copies what zero shares, and parallel.zero=0 shares "
            f"nothing (parallel.replicate=1 or parallel.zero=1)"
        )
    elif copies > 1 and data and (data % copies or data == copies):
        fitting = [n for n in range(1, data) if data % n == 0] or [1]
        nearest = min(fitting, key=lambda one: abs(one - copies))
        found.append(
            f"parallel.replicate={copies} must leave at least 2 of dp x cp = {data} ranks to each "
            f"group that shares, and divide them (parallel.replicate={nearest})"
        )
    elif copies > 1 and data % (copies * layout.ep):
        found.append(
            f"parallel.replicate={copies} does not divide the dp x cp / ep = {data} / {layout.ep} "
            f"ranks that hold the same experts (parallel.replicate=1 or parallel.ep=1)"
        )
    return found
