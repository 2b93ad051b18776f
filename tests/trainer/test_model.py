"""The model against what is known of its parts; the start values against any way of cutting it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from trainer.config import ModelConfig
from trainer.model import (
    IGNORE,
    Attention,
    NextTokenLoss,
    Transformer,
    initial_value,
    rotary_table,
    rotate,
)

TINY = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp=48)


def filled(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(initial_value(path, p.shape, TINY.layers, 0).to(p.dtype))
    return model.double()


def test_rotation_keeps_length_and_depends_on_distance_only() -> None:
    table = rotary_table(64, 16, 10000.0, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 16, dtype=torch.float64, generator=generator)
    turned_q, turned_k = (rotate(one.expand(64, 16), table) for one in (q, k))
    assert torch.allclose(turned_q.norm(dim=-1), q.norm())
    assert torch.allclose(turned_q[0], q)
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 5, 20):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal))
    assert not torch.allclose(scores[0, 0], scores[0, 1])


def test_grouped_attention_is_full_attention_with_repeated_heads() -> None:
    grouped = filled(Attention(TINY))
    full = Attention(ModelConfig(layers=2, width=32, heads=4, kv_heads=4, mlp=48)).double()
    with torch.no_grad():
        full.query.weight.copy_(grouped.query.weight)
        full.out.weight.copy_(grouped.out.weight)
        for name in ("key", "value"):
            heads = getattr(grouped, name).weight.unflatten(0, (2, 8))
            getattr(full, name).weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    x = torch.randn(2, 10, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(grouped(x), full(x), rtol=1e-12)


def test_attention_against_its_formula() -> None:
    layer = filled(Attention(TINY))
    x = torch.randn(1, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    table = rotary_table(5, 8, TINY.rope_base, torch.float64, torch.device("cpu"))
    want = torch.zeros(5, 32, dtype=torch.float64)
    for head in range(4):
        shared = head // 2
        q = rotate(x[0] @ layer.query.weight[8 * head : 8 * head + 8].T, table)
        k = rotate(x[0] @ layer.key.weight[8 * shared : 8 * shared + 8].T, table)
        v = x[0] @ layer.value.weight[8 * shared : 8 * shared + 8].T
        scores = (q @ k.T / math.sqrt(8)).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
        want += scores.softmax(dim=-1) @ v @ layer.out.weight[:, 8 * head : 8 * head + 8].T
    assert torch.allclose(layer(x)[0], want, rtol=1e-10)


def test_no_position_sees_what_comes_after() -> None:
    model = filled(Transformer(TINY))
    text = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(4))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    ours, others = model(text), model(changed)
    assert torch.equal(ours[:, :7], others[:, :7])
    assert not torch.allclose(ours[:, 7:], others[:, 7:])


def test_an_untrained_model_is_near_uniform() -> None:
    model = filled(Transformer(TINY))
    text = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(5))
    loss = NextTokenLoss()(model(text[:, :-1]), text[:, 1:]) / (4 * 32)
    assert abs(loss.item() - math.log(TINY.vocabulary)) < 0.05


def test_loss_sums_valid_targets_only() -> None:
    logits = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(6))
    targets = torch.tensor([[5, IGNORE, 7], [IGNORE, IGNORE, 255]])
    picked = F.log_softmax(logits.double(), dim=-1)
    want = -(picked[0, 0, 5] + picked[0, 2, 7] + picked[1, 2, 255])
    assert math.isclose(NextTokenLoss()(logits, targets).item(), want.item(), rel_tol=1e-5)
    assert NextTokenLoss()(logits.bfloat16(), targets).dtype == torch.float32


def test_parameters_number_as_the_formula_says() -> None:
    total = sum(p.numel() for p in Transformer(TINY).parameters())
    attention = 2 * 32 * 32 + 2 * 32 * 16
    assert total == 2 * (attention + 3 * 32 * 48 + 2 * 32) + 2 * 256 * 32 + 32


def test_start_values_depend_on_seed_and_name_alone() -> None:
    shape = torch.Size((64, 96))
    first = initial_value("layers.0.mlp.up.weight", shape, 4, 0)
    torch.manual_seed(99)
    assert torch.equal(first, initial_value("layers.0.mlp.up.weight", shape, 4, 0))
    assert not torch.equal(first, initial_value("layers.1.mlp.up.weight", shape, 4, 0))
    assert not torch.equal(first, initial_value("layers.0.mlp.up.weight", shape, 4, 1))
    assert first.std().item() == pytest.approx(0.02, rel=0.05)
    deep = initial_value("layers.0.mlp.down.weight", shape, 32, 0)
    assert deep.std().item() == pytest.approx(0.02 / 8, rel=0.05)
    assert torch.equal(initial_value("norm.weight", torch.Size((3,)), 4, 0), torch.ones(3))
    assert torch.equal(initial_value("norm.bias", torch.Size((3,)), 4, 0), torch.zeros(3))
