"""Expert parallelism: each ep rank holds some experts of every layer; tokens travel to them.

In: a model and the mesh, whose ep axis is a part of the data ranks (dp x cp). Out: the same model
without the experts that other ranks hold; what stays keeps its path, and so its start values. An
expert's gradient is the sum over what came to it, and over its replicas on `mesh.expert_data`; the
router is replicated, and its gradient summed, like any dense parameter.

    rows by expert ──all-to-all──► rows of all ranks for own experts ─► MLPs ──all-to-all──► home

Bytes that a rank sends a layer and microbatch: 4 x r x width x itemsize, where r is how many of its
batch x sequence / cp x top_k choices fall on other ranks' experts and have a place (even load, none
dropped: (1 - 1 / ep) of them); out and home, in forward and in backward; recomputation adds 2 more.
Before them go 8 x experts bytes of row counts, and with capacity or balance under cp the choices
are gathered: 8 x batch x sequence x top_k. Ranks of tp each send all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.mlp import Experts, Router
from trainer.parallel.context import positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.mesh import Axis, Mesh


@dataclass(frozen=True)
class ExpertLoad:
    """Where the choices of one layer's router went in a step, over the global batch."""

    layer: int
    """Among the layers that have experts."""
    shares: tuple[float, ...]
    """Of all choices, by expert; dropped ones count for the expert that had no place."""
    dropped: float
    """Share of the choices that found no place."""

    @property
    def peak(self) -> float:
        """The busiest expert's load as a multiple of the even one."""
        return max(self.shares) * len(self.shares)


def parallelize(model: nn.Module, mesh: Mesh) -> frozenset[str]:
    """Keep this rank's experts, and let routers and experts work over the mesh; the paths of the
    parameters that are split over ep."""
    for module in model.modules():
        if isinstance(module, Router) and mesh["cp"].size > 1:
            module.__class__ = ContextParallelRouter
            module.axis = mesh["cp"]  # type: ignore[assignment]  # torch types attributes as tensors
        elif isinstance(module, Experts) and mesh.ep.size > 1:
            module.__class__ = ExpertParallelExperts
            module.axis = mesh.ep  # type: ignore[assignment]
            held = module.number // mesh.ep.size
            for number in range(module.number):
                if number // held != mesh.ep.index:
                    del module[str(number)]
    return frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for name, _ in module.named_parameters()
    )


def routers(model: nn.Module) -> list[Router]:
    """Every router of the model, in the order of forward."""
    return [module for module in model.modules() if isinstance(module, Router)]


def take_load(routers: Sequence[Router], device: torch.device) -> Tensor:
    """What this rank's part of a step chose, float64, each router's counts after the one's before.

    The sum over ranks is what `load_of` reads. The counts begin anew.
    """
    sizes = [router.number + 1 for router in routers]
    taken = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    for router, counts in zip(routers, torch.split(taken, sizes), strict=True):
        if router.load is not None:
            counts.copy_(router.load)
            router.load = None
    return taken


def load_of(routers: Sequence[Router], summed: list[float]) -> tuple[ExpertLoad, ...]:
    """From counts summed over all ranks to shares."""
    found, at = [], 0
    for layer, router in enumerate(routers):
        *chosen, dropped = summed[at : at + router.number + 1]
        at += router.number + 1
        every = max(sum(chosen), 1.0)
        found.append(ExpertLoad(layer, tuple(one / every for one in chosen), dropped / every))
    return tuple(found)


class ContextParallelRouter(Router):
    """A router that sees some positions of every sample; places are given over all of them."""

    axis: Axis

    def gather(self, choice: Tensor) -> Tensor:
        """(batch, own positions, top_k) to (batch, all positions, top_k), in their order."""
        axis = self.axis
        parts = choice.new_empty((axis.size, *choice.shape))
        axis.all_gather(parts, choice.contiguous())
        whole = torch.cat(parts.unbind(), dim=1)
        length = whole.shape[1]
        order = torch.cat([positions(length, index, axis.size) for index in range(axis.size)])
        return torch.empty_like(whole).index_copy_(1, order.to(whole.device), whole)

    def keep_own(self, whole: Tensor) -> Tensor:
        """(batch, all positions, ...) to (batch, own positions, ...)."""
        own = positions(whole.shape[1], self.axis.index, self.axis.size)
        return whole.index_select(1, own.to(whole.device))


class ExpertParallelExperts(Experts):
    """Experts of which this rank holds a part, the same number as each other rank of ep."""

    axis: Axis

    def compute(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """As Experts.compute, for the experts of all ranks."""
        axis, held = self.axis, len(self)
        theirs = axis.all_to_all(
            torch.tensor(sizes, device=rows.device), [held] * axis.size, [held] * axis.size
        ).tolist()
        send, receive = _by_rank(sizes, held), _by_rank(theirs, held)
        arrived = _Exchange.apply(rows, send, receive, axis)
        by_rank = list(range(len(theirs)))
        by_expert = [one for number in range(held) for one in by_rank[number::held]]
        grouped = _reorder(arrived, theirs, by_expert)
        own = [sum(theirs[number::held]) for number in range(held)]
        out = super().compute(grouped, own)
        back = sorted(by_rank, key=by_expert.__getitem__)
        home = _reorder(out, [theirs[one] for one in by_expert], back)
        returned: Tensor = _Exchange.apply(home, receive, send, axis)
        return returned


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
        ctx.way = (receive, send, axis)
        return axis.all_to_all(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        receive, send, axis = ctx.way
        return axis.all_to_all(grad, receive, send), None, None, None


def _by_rank(sizes: list[int], held: int) -> list[int]:
    """Rows of each rank's experts together."""
    return [sum(sizes[at : at + held]) for at in range(0, len(sizes), held)]


def _reorder(rows: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Stretches of `rows`, `sizes[i]` long, in another order."""
    ends = list(accumulate(sizes))
    stretches = [rows[ends[one] - sizes[one] : ends[one]] for one in order]
    return torch.cat(stretches)
