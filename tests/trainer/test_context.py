"""Attention over cut sequences is attention: against SDPA in float64, forward and backward."""

from __future__ import annotations

import threading
from collections import defaultdict
from queue import Queue
from unittest import mock

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from trainer.mesh import Axis
from trainer.parallel import context
from trainer.parallel.context import positions

BATCH, HEADS, SHARED, LENGTH, HEAD = 2, 4, 2, 24, 6


class Wire:
    """Ranks are threads, and the ring is queues; counts what each rank sends."""

    def __init__(self) -> None:
        self.ways: dict[tuple[int, int], Queue[torch.Tensor]] = defaultdict(Queue)
        self.sent: dict[int, int] = defaultdict(int)
        self.lock = threading.Lock()

    def pass_on(self, block: torch.Tensor, axis: Axis, tag: int = 0) -> Queue[torch.Tensor]:
        with self.lock:
            self.sent[axis.index] += block.numel()
            after = self.ways[(axis.index + 1) % axis.size, tag]
            mine = self.ways[axis.index, tag]
        after.put(block.clone())
        return mine

    @staticmethod
    def arrived(way: Queue[torch.Tensor]) -> torch.Tensor:
        return way.get(timeout=20)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, heads, LENGTH, HEAD) for heads in (HEADS, SHARED, SHARED, HEADS)]
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def sdpa() -> list[torch.Tensor]:
    """Output and gradients of query, key and value by torch's own attention."""
    query, key, value, slope = inputs()
    leaves = [one.requires_grad_() for one in (query, key, value)]
    wide = [one.repeat_interleave(HEADS // SHARED, dim=1) for one in leaves[1:]]
    out = F.scaled_dot_product_attention(query, *wide, is_causal=True)
    out.backward(slope)
    return [out.detach(), *(one.grad for one in leaves)]


def ring(size: int, index: int) -> list[torch.Tensor]:
    own = positions(LENGTH, index, size)
    query, key, value, slope = (one[..., own, :] for one in inputs())
    leaves = [one.clone().requires_grad_() for one in (query, key, value)]
    axis = Axis("cp", size, index, tuple(range(size)), None)
    out = context._Ring.apply(*leaves, None, axis)
    out.backward(slope)
    return [out.detach(), *(one.grad for one in leaves)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring_attention_is_sdpa_and_sends_what_its_formula_says(size: int) -> None:
    wire = Wire()
    found: dict[int, list[torch.Tensor]] = {}
    with (
        mock.patch.object(context, "_pass_on", wire.pass_on),
        mock.patch.object(context, "_arrived", wire.arrived),
    ):
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: ring(size, i)}))
            for i in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    true = sdpa()
    for index in range(size):
        own = positions(LENGTH, index, size)
        for ours, whole in zip(found[index], true, strict=True):
            assert torch.allclose(ours, whole[..., own, :], rtol=1e-12, atol=1e-13)
    # Keys and values of a rank's own positions: n - 1 hops forward; backward the same again, and
    # their gradients n hops, so that they are home.
    block = 2 * BATCH * SHARED * (LENGTH // size) * HEAD
    assert set(wire.sent.values()) == {block * (2 * (size - 1) + size)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_positions_and_work_evenly(size: int) -> None:
    shares = [positions(LENGTH, index, size) for index in range(size)]
    assert sorted(torch.cat(shares).tolist()) == list(range(LENGTH))
    seen = {int((share + 1).sum()) for share in shares}
    assert len(seen) == 1, "under a causal mask, a position costs its number"
