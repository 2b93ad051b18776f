"""The ranks as a grid: one process group an axis, and the sums that run on them.

In: a Layout, the axis order and the default process group (none in a run of one process).
Out: `Mesh`, whose axes know their size, this rank's index and their group; an axis of size 1 has
no group and its collectives do nothing, so that callers never ask which axes are on.

    order pp,dp,tp and pp=2 dp=1 tp=2:      pp0: [0 1]   pp1: [2 3]     tp groups are the rows
"""

from __future__ import annotations

import math
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

    def all_to_all(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Rows for each rank, end to end, to the rows from each, by index.

        `send` and `receive` are numbers of rows by index; any may be 0.
        """
        if self.group is None:
            return rows
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=self.group)
        return arrived


@dataclass(frozen=True)
class Mesh:
    """All axes, and this rank's place among them."""

    axes: Mapping[str, Axis]
    """By name, outermost first."""
    rank: int
    world: int
    data: Axis
    """dp and cp together: ranks that hold the same parameters and see different tokens."""
    ep: Axis
    """The part of `data` whose ranks hold different experts."""
    expert_data: Axis
    """The ranks of `data` that hold the same experts."""

    def __getitem__(self, name: str) -> Axis:
        return self.axes.get(name) or _alone(name, self.rank)

    def sum_over_world(self, tensor: torch.Tensor) -> None:
        """Sum in place over all ranks, on the default group."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def owns(self, sharded_over: frozenset[str]) -> bool:
        """Whether this rank is the one that counts a value which other ranks may hold too.

        A value is replicated over every axis that it isn't sharded over; index 0 counts it. Stages
        of pp hold different values, so pp never replicates. Of dp and cp, what is sharded over ep
        is replicated over the expert_data ranks only.
        """
        axes = dict(self.axes)
        if "ep" in sharded_over:
            axes = {name: axis for name, axis in axes.items() if name not in {"dp", "cp"}}
            axes["dp"] = self.expert_data
        return all(
            axis.index == 0
            for name, axis in axes.items()
            if name != "pp" and name not in sharded_over
        )

    def describe(self) -> str:
        """`pp2 x dp1 x tp2`: sizes in mesh order, outermost first."""
        grid = " x ".join(f"{axis.name}{axis.size}" for axis in self.axes.values())
        return f"{grid}, ep{self.ep.size} of dp x cp" if self.ep.size > 1 else grid


def build(layout: Layout, order: tuple[str, ...], device: torch.device, timeout: float) -> Mesh:
    """The mesh over the default process group; tells whoever watches what its groups are.

    `timeout` is in seconds and holds for the axes' groups, which do not inherit the default one's.
    """
    if layout.world == 1:
        axes = {name: _alone(name, 0) for name in order if name in ALWAYS}
        alone, dp = _alone("ep", 0), axes["dp"]
        return Mesh(axes=axes, rank=0, world=1, data=dp, ep=alone, expert_data=dp)
    far = "ep" in order[: min(order.index(name) for name in ("dp", "cp") if name in order)]
    grid_axes = [name for name in order if name != "ep"]
    order = tuple(name for name in grid_axes if name in ALWAYS or layout.size(name) > 1)
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
    rows = _data_rows(grid, order)
    data = _join("dp", rows, timeout) if layout.cp > 1 < layout.dp else axes[_only(layout)]
    ep, expert_data = _alone("ep", dist.get_rank()), data
    if layout.ep > 1:
        shared, copies = expert_rows(rows, layout.ep, far=far)
        ep = _join("ep", shared, timeout)
        expert_data = _join("dp", copies, timeout)
    coordinates = {name: axis.index for name, axis in axes.items()}
    annotate.mesh(coordinates | ({"ep": ep.index} if layout.ep > 1 else {}), order)
    return Mesh(axes, dist.get_rank(), layout.world, data, ep, expert_data)


def expert_rows(
    rows: list[list[int]], ep: int, *, far: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks that share the experts, and ranks that hold the same ones, of each row of data ranks.

    Near: an ep group is `ep` neighbours of its row. Far: its ranks are as far apart as can be, and
    those with the same experts are neighbours.
    """
    shared: list[list[int]] = []
    copies: list[list[int]] = []
    for row in rows:
        wide = len(row) // ep if far else ep
        chunks = [row[at : at + wide] for at in range(0, len(row), wide)]
        strided = [row[at::wide] for at in range(wide)]
        shared += strided if far else chunks
        copies += chunks if far else strided
    return shared, copies


def _alone(name: str, rank: int) -> Axis:
    return Axis(name, 1, 0, (rank,), None)


def _only(layout: Layout) -> str:
    """dp or cp, whichever has all data ranks."""
    return "cp" if layout.cp > 1 else "dp"


def _data_rows(grid: DeviceMesh, order: tuple[str, ...]) -> list[list[int]]:
    """The ranks that see different tokens under the same parameters, ascending; every such row."""
    dims = [order.index(name) for name in ("dp", "cp") if name in order]
    rest = [i for i in range(len(order)) if i not in dims]
    size = math.prod(grid.mesh.shape[i] for i in dims)
    return [sorted(row) for row in grid.mesh.permute(*rest, *dims).reshape(-1, size).tolist()]


def _join(name: str, rows: list[list[int]], timeout: float) -> Axis:
    """This rank's row as an axis, with a group of its own where it is more than this rank."""
    found = None
    for row in rows:  # every rank makes every group, in the same order
        group = dist.new_group(row) if len(row) > 1 else None
        if dist.get_rank() not in row:
            continue
        own = group if isinstance(group, dist.ProcessGroup) else None
        found = Axis(name, len(row), row.index(dist.get_rank()), tuple(row), own)
        if own is not None:
            _limit(own, timeout)
            annotate.group(own.group_name, name)
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
