"""Attention over cut sequences is attention: against SDPA in float64, forward and backward."""

from __future__ import annotations

import threading
from collections import defaultdict
from queue import Queue
from unittest import mock

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from trainer.documents import Documents, tile
from trainer.mesh import Axis
from trainer.parallel import context
from trainer.parallel.context import positions

BATCH, LENGTH, HEAD = 2, 24, 6
HEADS = [(4, 2), (4, 1), (3, 3)]
"""Heads of queries, and of keys and values."""
BEGINS = {
    "causal": None,
    "documents": [[0, 0, 3, 14, 15], [0, 7, 8, 9, 10, 11, 12]],
    "documents that end at cuts": [[0, 3, 4, 6, 12, 18], [0, 12, 20]],
    "one document a position": [list(range(LENGTH))] * 2,
}
"""Where documents begin, a list a sample."""


def documents(name: str) -> Documents | None:
    starts = BEGINS[name]
    if starts is None:
        return None
    begins = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for sample, own in enumerate(starts):
        for start in own:
            begins[sample, start:] = start
    return Documents(begins, begins)


class Wire:
    """Ranks are threads, and what they send are queues; counts the bytes that each one sends."""

    def __init__(self, size: int) -> None:
        self.ways: dict[tuple[int, int], Queue[torch.Tensor]] = defaultdict(Queue)
        self.sent: dict[int, int] = defaultdict(int)
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(size)
        self.shown: dict[int, torch.Tensor] = {}

    def pass_on(self, block: torch.Tensor, axis: Axis, tag: int = 0) -> Queue[torch.Tensor]:
        with self.lock:
            self.sent[axis.index] += block.nbytes
            after = self.ways[(axis.index + 1) % axis.size, tag]
            mine = self.ways[axis.index, tag]
        after.put(block.clone())
        return mine

    @staticmethod
    def arrived(way: Queue[torch.Tensor]) -> torch.Tensor:
        return way.get(timeout=20)

    def shows(self, axis: Axis, value: torch.Tensor, share: int) -> list[torch.Tensor]:
        """Everybody's value; sends one share of it to each other rank."""
        self.shown[axis.index] = value.clone()
        self.sent[axis.index] += (axis.size - 1) * value.nbytes // share
        self.barrier.wait(20)
        all_of_them = [self.shown[rank] for rank in range(axis.size)]
        self.barrier.wait(20)
        return all_of_them


class WiredAxis(Axis):
    """An axis whose collectives go over a Wire."""

    wire: Wire

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        into.copy_(torch.stack(self.wire.shows(self, own, 1)))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, *, wait: bool = True) -> None:
        assert wait
        own.copy_(sum(one[self.index] for one in self.wire.shows(self, whole, self.size)))


def inputs(heads: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, count, LENGTH, HEAD) for count in (heads[0], heads[1], heads[1], heads[0])]
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [one.to(dtype) for one in made]


def sdpa(heads: tuple[int, int], begins: Documents | None) -> list[torch.Tensor]:
    """Output and gradients of query, key and value by torch's own attention with a dense mask."""
    query, key, value, slope = inputs(heads)
    leaves = [one.requires_grad_() for one in (query, key, value)]
    wide = [one.repeat_interleave(heads[0] // heads[1], dim=1) for one in leaves[1:]]
    mask = torch.ones(LENGTH, LENGTH).tril().bool()[None]
    if begins is not None:
        mask = mask & (begins.begins[:, :, None] == begins.begins[:, None, :])
    out = F.scaled_dot_product_attention(query, *wide, attn_mask=mask[:, None])
    out.backward(slope)
    return [out.detach(), *(one.grad for one in leaves)]


def attended(form: str, axis: Axis, heads: tuple[int, int], name: str, dtype: torch.dtype):
    """What one rank has: its positions of the output, and of the gradients."""
    own = positions(LENGTH, axis.index, axis.size)
    query, key, value, slope = (one[..., own, :] for one in inputs(heads, dtype))
    leaves = [one.clone().requires_grad_() for one in (query, key, value)]
    begins = documents(name)
    module = mock.Mock(axis=axis)
    attend = context._FORMS[form].attend
    out = attend(module, *leaves, begins and begins.at(own))
    out.backward(slope)
    return [out.detach(), *(one.grad for one in leaves)]


def on_threads(
    form: str, size: int, heads: tuple[int, int], name: str, dtype: torch.dtype = torch.float64
) -> tuple[dict[int, list[torch.Tensor]], Wire]:
    wire = Wire(size)
    found: dict[int, list[torch.Tensor]] = {}

    def rank(index: int) -> None:
        axis = WiredAxis("cp", size, index, tuple(range(size)), None)
        object.__setattr__(axis, "wire", wire)
        found[index] = attended(form, axis, heads, name, dtype)

    with (
        mock.patch.object(context, "_pass_on", wire.pass_on),
        mock.patch.object(context, "_arrived", wire.arrived),
    ):
        threads = [threading.Thread(target=rank, args=(index,)) for index in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return found, wire


@pytest.mark.parametrize("name", BEGINS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("form", ["ring", "all-gather"])
def test_attention_over_cut_sequences_is_sdpa(
    form: str, size: int, heads: tuple[int, int], name: str
) -> None:
    found, _ = on_threads(form, size, heads, name)
    true = sdpa(heads, documents(name))
    for index in range(size):
        own = positions(LENGTH, index, size)
        for ours, whole in zip(found[index], true, strict=True):
            assert torch.allclose(ours, whole[..., own, :], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "documents"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("form", ["ring", "all-gather"])
def test_bytes_sent_are_what_the_formula_says(
    form: str, size: int, name: str, dtype: torch.dtype
) -> None:
    """The formula stands in trainer/parallel/context.py; documents save products, not bytes."""
    _, wire = on_threads(form, size, (4, 2), name, dtype)
    block = 2 * BATCH * 2 * (LENGTH // size) * HEAD
    wide = max(4, dtype.itemsize)
    per_rank = {
        "ring": block * (2 * (size - 1) * dtype.itemsize + size * wide),
        "all-gather": block * 2 * (size - 1) * dtype.itemsize,
    }[form]
    assert dict(wire.sent) == dict.fromkeys(range(size), per_rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_positions_and_work_evenly(size: int) -> None:
    shares = [positions(LENGTH, index, size) for index in range(size)]
    assert sorted(torch.cat(shares).tolist()) == list(range(LENGTH))
    seen = {int((share + 1).sum()) for share in shares}
    assert len(seen) == 1, "under a causal mask, a position costs its number"


def products(turn: int, index: int, size: int, begins: Documents | None) -> int:
    """Elements of the score matrices that a rank computes in a turn."""
    own = positions(LENGTH, index, size)
    axis = Axis("cp", size, index, tuple(range(size)), None)
    query = torch.empty(1, 1, len(own), HEAD)
    tiles = context._tiles(turn, query, begins and begins.at(own), axis)
    return sum((t.rows.stop - t.rows.start) * (t.columns.stop - t.columns.start) for t in tiles)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_turn_costs_every_rank_the_same(size: int) -> None:
    share = LENGTH // size
    for turn in range(size):
        costs = {products(turn, index, size, None) for index in range(size)}
        assert costs == {share**2 * 3 // 4 if turn == 0 else share**2 // 2}


def test_blocks_of_other_documents_are_not_computed() -> None:
    apart = documents("documents that end at cuts")
    assert apart is not None
    alone = Documents(apart.begins[:1], apart.host[:1])
    # Rank 0 has chunks 0 and 7 of 3 positions; only the last document reaches chunk 6, of rank 1.
    assert [products(turn, 0, 4, alone) for turn in (1, 2, 3)] == [0, 0, 3 * 3]
    every = documents("one document a position")
    assert every is not None
    assert sum(products(turn, 1, 4, every) for turn in range(1, 4)) == 0
    assert tile(torch.tensor([5, 6]), torch.tensor([7, 8]), None, torch.device("cpu")) is None
