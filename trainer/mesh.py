"""The ranks as a grid: one process group an axis, and the sums that run on them.

In: a Layout, the axis order and the default process group (none in a run of one process).
Out: `Mesh`, whose axes know their size, this rank's index and their group; an axis of size 1 has
no group and its collectives do nothing, so that callers never ask which axes are on.

    order pp,dp,tp and pp=2 dp=1 tp=2:      pp0: [0 1]   pp1: [2 3]     tp groups are the rows
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from collectors import annotate
from trainer.config import ALWAYS
from trainer.groups import divide, ep_is_far, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainer.layout import Layout

T = TypeVar("T")

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

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType | None = None,
        *,
        wait: bool = True,
    ) -> dist.Work | None:
        """Reduce in place over the axis (sum unless told).

        Returns when the value may be used; without `wait` at once, with the work if there is any.
        """
        if self.group is None:
            return None
        work: dist.Work | None = dist.all_reduce(
            tensor, op=op or dist.ReduceOp.SUM, group=self.group, async_op=not wait
        )
        return work

    def all_gather(
        self, into: torch.Tensor, own: torch.Tensor, *, wait: bool = True
    ) -> dist.Work | None:
        """Everybody's `own`, by index, end to end in `into`; both contiguous.

        `own` may be this rank's place in `into`. Without `wait` the work is returned.
        """
        if self.group is None:
            into.view(-1).copy_(own.view(-1))
            return None
        work: dist.Work | None = _gather(
            into.view(-1), own.view(-1), group=self.group, async_op=not wait
        )
        return work

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
    shard: Axis
    """The part of `data` that shares under ZeRO: neighbours in rank order, where links are best."""
    replica: Axis
    """The other part of `data`: ranks that hold the same share; of size parallel.replicate."""
    ep: Axis
    """The part of `data` whose ranks hold different experts."""
    expert_data: Axis
    """The ranks of `data` that hold the same experts."""
    expert_shard: Axis
    """Of `expert_data`, as `shard` is of `data`."""
    expert_replica: Axis
    """Of `expert_data`, as `replica` is of `data`."""

    def __getitem__(self, name: str) -> Axis:
        return self.axes.get(name) or one_rank(name, self.rank)

    def sum_over_world(self, tensor: torch.Tensor) -> None:
        """Sum in place over all ranks, on the default group."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def from_first(self, ask: Callable[[], T]) -> T:
        """What rank 0 answers, on every rank; the objects are pickled."""
        answers = [ask() if self.rank == 0 else None]
        if self.world > 1:
            dist.broadcast_object_list(answers, src=0)
        return cast("T", answers[0])

    def to_first(self, own: T) -> list[T] | None:
        """Everybody's `own` by rank, on rank 0; the objects are pickled."""
        if self.world == 1:
            return [own]
        everybody: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(own, everybody, dst=0)
        return everybody

    def deal(self, shares: list[T] | None) -> T:
        """Each rank's share of what rank 0 brings, by rank; the objects are pickled."""
        if self.world == 1 and shares:
            return shares[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, shares, src=0)
        return cast("T", own[0])

    def owns(self, sharded_over: frozenset[str]) -> bool:
        """Whether this rank is the one that counts a value which other ranks may hold too.

        A value is replicated over every axis that it isn't sharded over; index 0 counts it. Stages
        of pp hold different values, so pp never replicates. Of dp and cp, what is sharded over ep
        is replicated over the expert_data ranks only, and what is sharded over "shard" (ZeRO) over
        the replicas of the shards.
        """
        experts = "ep" in sharded_over
        if "shard" in sharded_over:
            copies = [self.expert_replica if experts else self.replica]
        elif experts:
            copies = [self.expert_data]
        else:
            copies = [self["dp"], self["cp"]]
        rest = [axis for name, axis in self.axes.items() if name not in {"pp", "dp", "cp"}]
        return all(axis.index == 0 for axis in (*copies, *rest) if axis.name not in sharded_over)

    def describe(self) -> str:
        """`pp2 x dp1 x tp2`: sizes in mesh order, outermost first."""
        grid = " x ".join(f"{axis.name}{axis.size}" for axis in self.axes.values())
        return f"{grid}, ep{self.ep.size} of dp x cp" if self.ep.size > 1 else grid


def build(
    layout: Layout,
    order: tuple[str, ...],
    device: torch.device,
    timeout: float,
    replicate: int = 1,
) -> Mesh:
    """The mesh over the default process group; tells whoever watches what its groups are.

    `timeout` is in seconds and holds for the axes' groups, which do not inherit the default one's.
    """
    if layout.world == 1:
        axes = {name: one_rank(name, 0) for name in order if name in ALWAYS}
        dp, ep = axes["dp"], one_rank("ep", 0)
        return Mesh(axes, 0, 1, dp, dp, one_rank("dp", 0), ep, dp, dp, one_rank("dp", 0))
    far = ep_is_far(order)
    order = tuple(
        name for name in order if name in ALWAYS or (layout.size(name) > 1 and name != "ep")
    )
    sizes = {name: layout.size(name) for name in order}
    grid = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=order)
    axes = {}
    for name in order:
        group = grid.get_group(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        on = len(ranks) > 1
        axes[name] = Axis(name, len(ranks), grid.get_local_rank(name), ranks, group if on else None)
        if on:
            _limit(group, timeout)
            annotate.group(group.group_name, name)
    together = rows(sizes, ("dp", "cp"))
    if layout.dp > 1 and layout.cp > 1:
        data = _join("dp", together, timeout)
    else:
        data = axes["cp" if layout.cp > 1 else "dp"]
    shard, replica = _shares(data, together, replicate, timeout)
    ep, experts = one_rank("ep", dist.get_rank()), (data, shard, replica)
    if layout.ep > 1:
        shared, copies = divide(together, layout.ep, far=far)
        ep = _join("ep", shared, timeout)
        same = _join("dp", copies, timeout)
        experts = (same, *_shares(same, copies, replicate, timeout))
    coordinates = {name: axis.index for name, axis in axes.items()}
    annotate.mesh(coordinates | ({"ep": ep.index} if layout.ep > 1 else {}), order)
    return Mesh(axes, dist.get_rank(), layout.world, data, shard, replica, ep, *experts)


def _shares(data: Axis, rows: list[list[int]], replicate: int, timeout: float) -> tuple[Axis, Axis]:
    """Who shares with whom under ZeRO, and who holds the same share; `data` is one of `rows`."""
    if replicate == 1:
        return data, one_rank("dp", dist.get_rank())
    shard, replica = divide(rows, data.size // replicate, far=False)
    return _join("dp", shard, timeout), _join("dp", replica, timeout)


def one_rank(name: str, rank: int) -> Axis:
    """An axis of one rank."""
    return Axis(name, 1, 0, (rank,), None)


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
