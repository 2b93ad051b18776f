"""Layers to stages by what they cost here: a short measurement, and a split that all ranks take.

In: the whole model on the meta device, already split over the axes within a stage, and a way to
fill a part. Out: `Loads`, the same on every rank, and a split for them.
Parts that look alike are measured once, one at a time, so that no rank ever holds the whole model.
Ranks of one tp or cp group measure together, since layers communicate within it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainer.config import ConfigError
from trainer.parallel.recompute import Keep, run
from trainer.split import Load, Loads, balanced, layers_among, need

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainer.mesh import Mesh
    from trainer.model import NextTokenLoss

_TURNS = 3
"""Timed forwards and backwards of a part, after one that is not; the fastest counts."""


@dataclass(frozen=True)
class Bench:
    """How parts are run when they are measured: as in training."""

    chain: Mapping[str, nn.Module]
    """All parts by path, in order."""
    device: torch.device
    autocast: torch.dtype | None
    samples: int
    """A microbatch."""
    positions: int
    """Of each sample that this rank works on."""
    shards: int
    """Parts of the sequence that ranks hold between layers."""
    width: int
    vocabulary: int
    loss: NextTokenLoss
    keep: Callable[[str], Keep]
    occupy: Callable[[str, nn.Module], object]
    """Gives a part, whose path is told, memory and values."""
    copies: float
    """Times that a parameter's bytes are held: weights, gradients and optimizer."""


def measure(bench: Bench, mesh: Mesh) -> Loads:
    """What each part costs, as the mean over all ranks."""
    known: dict[Any, Load] = {}
    loads: dict[str, Load] = {}
    paths = list(bench.chain)
    for path, part in bench.chain.items():
        shapes = tuple(p.shape for p in part.parameters())
        look = (type(part), shapes, bench.keep(path))
        if look not in known:
            bench.occupy(path, part)
            known[look] = _measured(
                path, part, bench, first=path == paths[0], last=path == paths[-1]
            )
            part.to("meta")
        loads[path] = known[look]
    numbers = torch.tensor(
        [[one.seconds, one.state, one.activations] for one in loads.values()],
        dtype=torch.float64, device=bench.device,
    )  # fmt: skip
    mesh.sum_over_world(numbers)
    rows = (numbers / mesh.world).tolist()
    agreed = {path: Load(*row) for path, row in zip(loads, rows, strict=True)}
    layers, parts = layers_among(paths), tuple(agreed.values())
    return Loads(
        layers=parts[layers.start : layers.stop],
        first=parts[: layers.start],
        last=parts[layers.stop :],
    )


def choose(
    loads: Loads, in_flight: Sequence[int], limit: int, mesh: Mesh, device: torch.device
) -> list[range]:
    """The balanced split, as rank 0 finds it. ConfigError, on all ranks, where the limit has none.

    `in_flight` are the microbatches that each stage holds at once, `limit` bytes a stage or 0.
    """
    stops = torch.zeros(len(in_flight), dtype=torch.int64, device=device)
    found = balanced(loads, in_flight, limit)
    if mesh.rank == 0 and found is not None:
        stops += torch.tensor([own.stop for own in found], device=device)
    mesh.sum_over_world(stops)
    ends = [int(one) for one in stops.tolist()]
    if not ends[-1]:
        raise ConfigError([_too_little(loads, in_flight, limit)])
    return [range(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]


def _too_little(loads: Loads, in_flight: Sequence[int], limit: int) -> str:
    """Which limit the split would keep to that needs least."""
    layers, stages = len(loads.layers), len(in_flight)
    sizes = sorted(
        need(loads, range(start, stop), stage, in_flight)[1]
        for stage in range(stages)
        for start in range(layers)
        for stop in range(start + 1, layers + 1)
    )
    at = bisect_left(sizes, True, key=lambda size: balanced(loads, in_flight, size) is not None)
    least = math.ceil(sizes[at])
    return (
        f"memory.limit={limit} bytes hold no stage of any split of {layers} layers into {stages}: "
        f"the lightest needs {least} (memory.limit={least}, memory.checkpoint=full, or more stages)"
    )


def _measured(path: str, part: nn.Module, bench: Bench, *, last: bool, first: bool) -> Load:
    samples, positions = bench.samples, bench.positions
    ids = (
        torch.arange(samples * positions, device=bench.device).view(samples, -1) % bench.vocabulary
    )
    dtype = next(part.parameters()).dtype
    shape = (samples, positions // bench.shards, bench.width)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = values.to(bench.device, dtype)
    kept = bench.keep(path)

    def turn() -> float:
        x = ids if first else values.clone().requires_grad_()
        _wait(bench.device)
        began = time.perf_counter()
        with torch.autocast(bench.device.type, bench.autocast) if bench.autocast else nullcontext():
            out = run(part, (x,), kept)
            out = bench.loss(out, ids) if last else out
        torch.autograd.backward(out, None if last else torch.ones_like(out))
        _wait(bench.device)
        return time.perf_counter() - began

    with _Kept(part, kept) as held:
        turn()
    seconds = min(turn() for _ in range(_TURNS))
    size = sum(p.numel() * p.element_size() for p in part.parameters())
    entry = 0 if kept is Keep.ALL else values.numel() * values.element_size()
    return Load(seconds, size * bench.copies, float(entry + held.size))


class _Kept:
    """Counts the bytes that a forward keeps beside its input."""

    def __init__(self, part: nn.Module, kept: Keep) -> None:
        self.size = 0
        self._seen = {p.untyped_storage().data_ptr() for p in part.parameters()}
        self._open = ExitStack()
        if kept is Keep.ALL:
            self._open.enter_context(saved_tensors_hooks(self._count, lambda one: one))
        elif kept is Keep.PRODUCTS:
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    hook = module.register_forward_hook(self._product, prepend=True)
                    self._open.callback(hook.remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _product(self, _module: nn.Module, _args: object, out: Tensor) -> None:
        self._count(out)

    def _count(self, tensor: Tensor) -> Tensor:
        """Once a storage: none is freed before the forward has ended."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.size += storage.nbytes()
        return tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
