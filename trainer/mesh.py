"""The ranks as a grid: one process group an axis, and the sums that run on them.

In: a Layout, the axis order and the default process group (none in a run of one process).
Out: `Mesh`, whose axes know their size, this rank's index and their group; an axis of size 1 has
no group and its collectives do nothing, so that callers never ask which axes are on.

    order pp,dp,tp and pp=2 dp=1 tp=2:      pp0: [0 1]   pp1: [2 3]     tp groups are the rows
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from collectors import annotate
from trainer.config import ALWAYS, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from trainer.layout import Layout

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Named anew in torch 2.14, which warns of the old names."""


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it."""

    name: str
    size: int
    index: int
    """This rank's coordinate on the axis."""
    ranks: tuple[int, ...]
    """Global ranks of this rank's group, by index."""
    group: dist.ProcessGroup | None
    """None where size is 1."""

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None = None) -> None:
        """Reduce in place over the axis (sum unless told); returns when the value may be used."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=self.group)

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Everybody's `own`, by index, end to end in `into`; both contiguous."""
        if self.group is None:
            into.view(-1).copy_(own.view(-1))
        else:
            _gather(into.view(-1), own.view(-1), group=self.group)

    def reduce_scatter(
        self, own: torch.Tensor, whole: torch.Tensor, *, wait: bool = True
    ) -> dist.Work | None:
        """Sum `whole` over the axis and keep this rank's share of it in `own`; both contiguous.

        Without `wait` the work is returned, and `whole` must live until it is done.
        """
        if self.group is None:
            own.view(-1).copy_(whole.view(-1))
            return None
        work: dist.Work | None = _scatter(
            own.view(-1), whole.view(-1), group=self.group, async_op=not wait
        )
        return work


@dataclass(frozen=True)
class Mesh:
    """All axes, and this rank's place among them."""

    axes: Mapping[str, Axis]
    """By name, outermost first."""
    rank: int
    world: int
    data: Axis
    """dp and cp together: ranks that hold the same parameters and see different tokens."""

    def __getitem__(self, name: str) -> Axis:
        return self.axes.get(name) or _alone(name, self.rank)

    def sum_over_world(self, tensor: torch.Tensor) -> None:
        """Sum in place over all ranks, on the default group."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def owns(self, sharded_over: frozenset[str]) -> bool:
        """Whether this rank is the one that counts a value which other ranks may hold too.

        A value is replicated over every axis that it isn't sharded over; index 0 counts it. Stages
        of pp hold different values, so pp never replicates.
        """
        return all(
            axis.index == 0
            for axis in self.axes.values()
            if axis.name != "pp" and axis.name not in sharded_over
        )

    def describe(self) -> str:
        """`pp2 x dp1 x tp2`: sizes in mesh order, outermost first."""
        return " x ".join(f"{axis.name}{axis.size}" for axis in self.axes.values())


def build(layout: Layout, order: tuple[str, ...], device: torch.device, timeout: float) -> Mesh:
    """The mesh over the default process group; tells whoever watches what its groups are.

    `timeout` is in seconds and holds for the axes' groups, which do not inherit the default one's.
    """
    if layout.world == 1:
        axes = {name: _alone(name, 0) for name in order if name in ALWAYS}
        return Mesh(axes=axes, rank=0, world=1, data=axes["dp"])
    order = tuple(name for name in order if name in ALWAYS or layout.size(name) > 1)
    grid = init_device_mesh(
        device.type, tuple(layout.size(name) for name in order), mesh_dim_names=order
    )
    axes = {}
    for name in order:
        group = grid.get_group(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        on = len(ranks) > 1
        axes[name] = Axis(name, len(ranks), grid.get_local_rank(name), ranks, group if on else None)
        if on:
            _limit(group, timeout)
            annotate.group(group.group_name, name)
    annotate.mesh({name: axis.index for name, axis in axes.items()}, order)
    data = _together(grid, axes, timeout) if layout.cp > 1 else axes["dp"]
    return Mesh(axes=axes, rank=dist.get_rank(), world=layout.world, data=data)


def _alone(name: str, rank: int) -> Axis:
    return Axis(name, 1, 0, (rank,), None)


def _together(grid: DeviceMesh, axes: Mapping[str, Axis], timeout: float) -> Axis:
    """dp and cp as one axis, by rank; a group of its own only where both are on."""
    if axes["dp"].size == 1:
        return axes["cp"]
    names = list(axes)
    dims = [names.index("dp"), names.index("cp")]
    rest = [i for i in range(len(names)) if i not in dims]
    rows = grid.mesh.permute(*rest, *dims).reshape(-1, axes["dp"].size * axes["cp"].size)
    found = None
    for row in map(sorted, rows.tolist()):  # every rank makes every group, in the same order
        group = dist.new_group(row)
        if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
            found = Axis("dp", len(row), row.index(dist.get_rank()), tuple(row), group)
            _limit(group, timeout)
            annotate.group(group.group_name, "dp")
    if found is None:
        raise RuntimeError(f"rank {dist.get_rank()} is not in the mesh")
    return found


def _limit(group: dist.ProcessGroup, timeout: float) -> None:
    """Let the collectives of `group` fail after `timeout` seconds; public since torch 2.14."""
    limit = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    limit(timedelta(seconds=timeout), group)


def pick_device(wanted: str) -> torch.device:
    """The device of this rank; ConfigError when CUDA is asked for and absent, or too few GPUs."""
    cuda = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not cuda):
        return torch.device("cpu")
    if not cuda:
        raise ConfigError(["train.device=cuda, but torch sees no CUDA device (train.device=cpu)"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            [
                (
                    f"local rank {local} has no GPU of its own: this node has "
                    f"{torch.cuda.device_count()} (--nproc-per-node, or train.device=cpu)"
                )
            ]
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def join(world: int, device: torch.device, timeout: float) -> None:
    """Enter the default process group that the launcher described; alone, there is none."""
    if world > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )


def leave() -> None:
    """Leave the default process group after a run that ended well."""
    if dist.is_initialized():
        dist.destroy_process_group()
