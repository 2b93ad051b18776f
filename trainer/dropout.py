"""Dropout that falls the same way under every layout.

In: a model, model.dropout, and the samples and positions on which a forward works. Out: the same
model with dropout behind the embedding and behind what attention and MLP add to the stream.
Whether an element falls is a function of seed, step, module, sample, position and channel, and of
nothing else: no generator has a state, so ranks that share a sequence, a batch or a stream agree
(or differ) as they must, and what is computed again in backward falls as it fell.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.parallel.context import positions

if TYPE_CHECKING:
    from typing import Any

    from trainer.config import Config
    from trainer.layout import Layout
    from trainer.mesh import Mesh

SITES = ("embed", "layers.*.attention", "layers.*.mlp")
"""Modules whose outputs are dropped, by path."""


class Passing:
    """Where the forward or backward that runs now stands in the batch; one object a rank."""

    def __init__(self, seed: int, positions: Tensor, first: int, samples: int) -> None:
        self.seed = seed
        self.positions = positions
        """(sequence,) those that this rank holds between layers."""
        self.first = first
        """The place in the global batch of this rank's first sample."""
        self.samples = samples
        """A microbatch."""
        self.step = 0
        self.microbatch = 0

    def rows(self) -> Tensor:
        """(samples,) places in the global batch of the samples that pass now."""
        start = self.first + self.microbatch * self.samples
        return torch.arange(start, start + self.samples, device=self.positions.device)


def passing(config: Config, layout: Layout, mesh: Mesh, device: torch.device) -> Passing:
    """Which samples and positions of the batch pass between this rank's layers."""
    own = positions(config.train.sequence, mesh["cp"].index, layout.cp)
    if config.parallel.sp:
        own = own.chunk(layout.tp)[mesh["tp"].index]
    first = mesh["dp"].index * (config.train.global_batch // layout.dp)
    return Passing(config.train.seed, own.to(device), first, config.train.microbatch)


def install(model: nn.Module, rate: float, now: Passing) -> None:
    """Drop what the modules at SITES give, while they train; a rate of 0 changes nothing."""
    if not rate:
        return
    for path, module in model.named_modules():
        if any(fnmatchcase(path, site) and path.count(".") == site.count(".") for site in SITES):
            module.register_forward_hook(partial(_dropped, path, rate, now))


def _dropped(
    path: str, rate: float, now: Passing, module: nn.Module, _args: Any, x: Tensor
) -> Tensor:
    if not module.training:
        return x
    key = hashlib.sha256(f"{now.seed}/{now.step}/{path}".encode()).digest()
    fallen = falls(key, now.rows(), now.positions, x.shape[-1], rate)
    return x.masked_fill(fallen, 0.0) * (1 / (1 - rate))


def falls(key: bytes, rows: Tensor, positions: Tensor, channels: int, rate: float) -> Tensor:
    """Which elements of (rows, positions, channels) fall, bool; each one alone decides itself.

    A hash of two multiplications (the "lowbias32" constants of Wellons 2018) of a token's key and
    a channel's, in wrapping 32-bit arithmetic: about ten passes over the elements.
    """
    first, second, third = (
        int.from_bytes(key[at : at + 4], "big", signed=True) for at in (0, 4, 8)
    )
    of_row = _mixed(rows.to(torch.int32) ^ first)
    of_token = _mixed(of_row[:, None] + (positions.to(torch.int32) ^ second))
    numbers = torch.arange(channels, dtype=torch.int32, device=rows.device)
    of_channel = _mixed(numbers ^ third)
    drawn = _mixed(of_token[..., None] ^ of_channel)
    return drawn < min(round(rate * 2**32) - 2**31, 2**31 - 1)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of int32 without visible pattern, in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x
