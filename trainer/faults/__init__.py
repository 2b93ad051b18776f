"""Faults on purpose, so that a diagnosis can be held against a known truth.

In: the `faults` section and this rank. Out: one object that the trainer calls at its seams
(fault.py); without a fault, or on another rank, every call does what is right.
Each fault does the real thing (a signal, a read() that blocks, a collective of another shape, a
slower computation, an allocation that cannot succeed); nothing is only printed or pretended.
Which layouts a fault can be on stands in trainer/limits/faults.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.config import ConfigError
from trainer.faults import ends, numbers, slow, together
from trainer.faults.fault import Fault
from trainer.limits.faults import ALL, COPY, REPLICA, STAGE
from trainer.parallel.pipeline import own_stages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from trainer.config import FaultConfig
    from trainer.mesh import Mesh

__all__ = ["Fault", "check", "make"]

_KINDS: dict[str, type[Fault]] = {
    "rank-dies": ends.RankDies,
    "rank-stalls": slow.RankStalls,
    "straggler": slow.Straggler,
    "slow-forward": slow.SlowForward,
    "slow-backward": slow.SlowBackward,
    "slow-data": slow.SlowData,
    "slow-stage": slow.Straggler,
    "rank0-work": slow.RankZeroWork,
    "rank0-collective": together.RankZeroCollective,
    "collective-mismatch": together.CollectiveMismatch,
    "collective-dtype": together.CollectiveDtype,
    "collective-order": together.CollectiveOrder,
    "collective-extra": together.CollectiveExtra,
    "collective-missing": together.CollectiveMissing,
    "uneven-inputs": together.UnevenInputs,
    "nan": numbers.NotANumber,
    "replicas-apart": numbers.ReplicasApart,
    "sum-not-mean": numbers.SumNotMean,
    "no-set-epoch": numbers.NoSetEpoch,
    "router-collapse": numbers.RouterCollapse,
    "capacity-overflow": numbers.CapacityOverflow,
}
_ON_DEVICE = {
    "oom": ends.OutOfMemory,
    "leak": ends.Leak,
    "exception-swallowed": together.ExceptionSwallowed,
}


def make(config: FaultConfig, rank: int, device: torch.device, mesh: Mesh | None = None) -> Fault:
    """The fault of this rank, or one that does nothing; some strike ranks of the mesh together."""
    if config.kind == "none" or not _strikes(config, rank, mesh):
        return Fault(config)
    if config.kind in _ON_DEVICE:
        return _ON_DEVICE[config.kind](config, device)
    return _KINDS[config.kind](config)


def check(
    config: FaultConfig, mesh: Mesh, chain: Mapping[str, nn.Module], layers: Sequence[range]
) -> None:
    """ConfigError, on every rank, where faults.rank has no module of the name."""
    if config.kind != "nan" or not config.module:
        return
    axis = replace(mesh["pp"], index=_place(config.rank, mesh).get("pp", 0))
    held = own_stages(list(chain), axis, layers)
    own = [path for paths in held.values() for path in paths]
    if numbers.find({path: chain[path] for path in own}, config.module) is None:
        why = f"faults.module={config.module} is no module of rank {config.rank}, which has "
        raise ConfigError([f"{why}{', '.join(own)} and what is in them (faults.module={own[-1]})"])


def _strikes(config: FaultConfig, rank: int, mesh: Mesh | None) -> bool:
    """Whether this rank is among those that the fault strikes."""
    if config.kind in ALL:
        return True
    alike = {STAGE: ("pp",), REPLICA: ("dp",), COPY: ("dp", "cp")}
    axes = next((axes for kinds, axes in alike.items() if config.kind in kinds), ())
    if not axes or mesh is None:
        return config.rank == rank
    own, struck = _place(rank, mesh), _place(config.rank, mesh)
    return all(own[name] == struck[name] for name in axes if name in own)


def _place(rank: int, mesh: Mesh) -> dict[str, int]:
    """Index on each axis."""
    at = np.unravel_index(rank, tuple(axis.size for axis in mesh.axes.values()))
    return {name: int(index) for name, index in zip(mesh.axes, at, strict=True)}
