"""A token sees its own document and nothing else, and no more is computed than that needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from trainer import documents as documents_file
from trainer.config import ModelConfig
from trainer.documents import Documents, attention, of_targets, tile, visible_pairs
from trainer.model import IGNORE, Transformer, initial_value

CPU = torch.device("cpu")
TINY = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp=48)


def begins_of(ends: list[list[bool]]) -> Documents:
    """Documents of samples, from whether each position is the last of its document."""
    return of_targets([np.where(one, IGNORE, 7) for one in ends], IGNORE)


def dense(documents: Documents) -> torch.Tensor:
    """(samples, positions, positions): who sees whom, by names of documents."""
    length = documents.host.shape[1]
    same = documents.host[:, :, None] == documents.host[:, None, :]
    return same & torch.ones(length, length).tril().bool()


@st.composite
def some_documents(draw: st.DrawFn) -> Documents:
    length, samples = draw(st.integers(1, 17)), draw(st.integers(1, 3))
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    return begins_of([draw(flags) for _ in range(samples)])


def test_a_document_begins_where_the_target_before_it_counts_for_nothing() -> None:
    told = of_targets([np.array([5, IGNORE, 6, 7, IGNORE]), np.array([IGNORE, 1, 1, 1, 1])], IGNORE)
    assert told.begins.tolist() == [[0, 0, 2, 2, 2], [0, 1, 1, 1, 1]]
    assert told.at(torch.tensor([1, 4])).begins.tolist() == [[0, 2], [1, 1]]


@given(some_documents(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_tile_is_what_the_dense_mask_says_and_misses_nothing(
    documents: Documents, data: st.DataObject
) -> None:
    length = documents.host.shape[1]
    chosen = st.sets(st.integers(0, length - 1), min_size=1).map(sorted)
    rows, columns = torch.tensor(data.draw(chosen)), torch.tensor(data.draw(chosen))
    want = dense(documents)[:, rows][:, :, columns]
    found = tile(rows, columns, documents.at(rows), CPU)
    ours = torch.zeros_like(want)
    if found is not None:
        hidden = torch.zeros(()) if found.hidden is None else found.hidden
        ours[:, found.rows, found.columns] = ~hidden.bool()
    assert torch.equal(ours, want)


@given(some_documents())
@settings(max_examples=50, deadline=None)
def test_pairs_are_counted_as_they_are_seen(documents: Documents) -> None:
    samples, length = documents.host.shape
    rows = torch.arange(length)
    assert visible_pairs(rows, documents, samples) == int(dense(documents).sum())
    assert visible_pairs(rows, None, samples) == samples * length * (length + 1) // 2
    halves = [visible_pairs(own, documents.at(own), samples) for own in rows.tensor_split(2)]
    assert sum(halves) == visible_pairs(rows, documents, samples)


@pytest.mark.parametrize("rows", [1, 3, 5, 100])
def test_attention_in_blocks_of_rows_is_attention_with_the_dense_mask(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_file, "_ROWS", rows)
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64, generator=generator)
    told = begins_of([[i in ends for i in range(12)] for ends in ((2, 3, 8), (11,))])
    for documents in (told, None):
        mask = dense(told) if documents else torch.ones(12, 12).tril().bool()[None]
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        ours = attention(q, k, v, torch.arange(12), documents, stretch=12)
        assert torch.allclose(ours, want, rtol=1e-12)


def test_documents_packed_together_give_what_each_gives_alone() -> None:
    """So rotary positions need not restart: only distances count, and those stay."""
    model = Transformer(TINY)
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(initial_value(path, p.shape, TINY.layers, 0))
    model.double()
    text = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(4))
    pieces = [slice(0, 7), slice(7, 8), slice(8, 20)]
    packed = model(text, begins_of([[i in (6, 7) for i in range(20)]]))
    for piece in pieces:
        assert torch.allclose(packed[:, piece], model(text[:, piece]), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(packed[:, 8:], model(text)[:, 8:], rtol=1e-3)
