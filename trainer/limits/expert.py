"""Which experts a model can have, and which ranks can share them; arithmetic only, no torch.

In: a Config, and a Layout. Out: a line for each reason why it cannot work, with the flag to change.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.layout import Layout


def model_problems(config: Config) -> list[str]:
    """What no layout can mend."""
    model = config.model
    if model.experts and model.top_k > model.experts:
        found = f"model.top_k={model.top_k} exceeds model.experts={model.experts} "
        return [f"{found}(model.top_k={model.experts} or model.experts={model.top_k})"]
    if not model.experts and model.capacity:
        found = f"model.capacity={model.capacity:g} limits experts, and model.experts is 0 "
        return [f"{found}(model.capacity=0 or model.experts=8)"]
    return []


def problems(config: Config, layout: Layout) -> list[str]:
    """What keeps these ranks from sharing the experts."""
    experts, ep, data = config.model.experts, layout.ep, layout.dp * layout.cp
    if ep == 1:
        return []
    if config.model.file:
        return [f"parallel.ep={ep} shares experts of the trainer's own model (parallel.ep=1)"]
    if not experts:
        why = f"parallel.ep={ep} shares experts, and model.experts is 0 "
        return [f"{why}(parallel.ep=1 or model.experts={4 * ep})"]
    fits = sharing(experts, data)
    found = []
    if experts % ep:
        found.append(
            f"parallel.ep={ep} does not divide model.experts={experts} "
            f"(parallel.ep={_nearest(sharing(experts, experts), ep)} or "
            f"model.experts={math.ceil(experts / ep) * ep})"
        )
    if data and data % ep:
        found.append(
            f"parallel.ep={ep} takes its ranks from dp x cp = {layout.dp} x {layout.cp} and does "
            f"not divide them (parallel.ep={_nearest(fits, ep)})"
        )
    return found


def order_problems(order: tuple[str, ...]) -> list[str]:
    """Whether the place of ep in mesh.order says which data ranks share experts."""
    data = [order.index(name) for name in ("dp", "cp") if name in order]
    if "ep" in order and data and min(data) < order.index("ep") < max(data):
        usual = ",".join([*(name for name in order if name != "ep"), "ep"])
        why = f"mesh.order={','.join(order)}: ep is no axis between dp and cp but a part of both; "
        return [f"{why}it stands before or after them (mesh.order={usual})"]
    return []


def sharing(experts: int, data: int) -> list[int]:
    """Numbers of ranks that can share `experts`, of `data` ranks."""
    common = math.gcd(experts, data)
    return [ep for ep in range(1, common + 1) if common % ep == 0] or [1]


def _nearest(choices: list[int], wanted: int) -> int:
    return min(choices, key=lambda one: abs(one - wanted))
