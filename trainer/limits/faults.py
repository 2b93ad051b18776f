"""Where each fault strikes, and on which layouts it makes sense; no torch.

In: a Config and a Layout. Out: a line for each reason, with the flag to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config, FaultConfig
    from trainer.layout import Layout

STAGE = ("slow-stage",)
"""Strike all ranks of the pp stage of faults.rank."""
REPLICA = ("uneven-inputs",)
"""Strike all ranks that read the same samples as faults.rank: those of its dp index."""
COPY = ("replicas-apart",)
"""Strike all ranks that hold the same replica of the model: those of its dp and cp index."""
ALL = ("sum-not-mean", "no-set-epoch", "router-collapse", "capacity-overflow")
"""Strike every rank."""
FIRST = ("rank0-collective", "rank0-work")
"""Strike rank 0, as what stands under a rank guard does."""
_TOGETHER = (
    "collective-mismatch",
    "collective-dtype",
    "collective-order",
    "collective-extra",
    "collective-missing",
    *FIRST,
)


def problems(config: Config, layout: Layout) -> list[str]:
    """Why this fault cannot be on this layout."""
    found = [f"faults.kind={config.faults.kind} {why}" for why in _reasons(config, layout)]
    if config.faults.module and config.faults.kind != "nan":
        found.append(
            f"faults.module={config.faults.module} is of faults.kind=nan only (faults.module=)"
        )
    if ".experts." in config.faults.module and layout.ep > 1:
        mlp = config.faults.module.partition(".experts.")[0]
        found.append(
            f"faults.module={config.faults.module} is on some ep ranks only (faults.module={mlp})"
        )
    return found


def where(fault: FaultConfig) -> str:
    """On whom it strikes, for people."""
    if fault.kind in ALL:
        return "all ranks"
    of = {STAGE: "the stage of ", REPLICA: "the dp index of ", COPY: "the replica of "}
    prefix = next((words for kinds, words in of.items() if fault.kind in kinds), "")
    return f"{prefix}rank {fault.rank}"


def _reasons(config: Config, layout: Layout) -> list[str]:
    kind, rank = config.faults.kind, config.faults.rank
    found = []
    if kind in ALL and rank:
        found.append("is of all ranks (faults.rank=0)")
    if kind in FIRST and rank:
        found.append("is of rank 0 (faults.rank=0)")
    if kind == "collective-order" and config.faults.step == 0:
        found.append("goes by the step before it (faults.step=1)")
    if kind in _TOGETHER and layout.world == 1:
        found.append("needs peers, and there is one rank (--nproc-per-node 2)")
    if kind in STAGE and layout.pp == 1:
        found.append("slows one pipeline stage of several, and there is one (parallel.pp=2)")
    if kind in REPLICA and layout.dp == 1:
        found.append("needs ranks that read other samples, and dp is 1 (parallel.dp=2)")
    if kind in (*COPY, "sum-not-mean") and layout.dp * layout.cp == 1:
        found.append("is about the sum over replicas, and there is one (parallel.dp=2)")
    if kind in COPY and (config.parallel.zero or config.memory.offload != "none"):
        found.append(
            "needs replicas that are updated apart; sharing and offloading update shares "
            "(parallel.zero=0 memory.offload=none)"
        )
    if kind in {"router-collapse", "capacity-overflow"} and not config.model.experts:
        found.append("needs experts (model.experts=8)")
    return found
