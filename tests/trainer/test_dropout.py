"""Which elements fall: a fair coin for each, the same for whoever asks, and none in evaluation."""

from __future__ import annotations

import pytest
import torch

from trainer.config import ModelConfig
from trainer.dropout import Passing, falls, install
from trainer.model import Transformer, initial_value

KEY = bytes(range(32))
ROWS, POSITIONS, CHANNELS = torch.arange(32), torch.arange(64), 128


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_as_many_fall_as_were_asked_for_along_every_dim(rate: float) -> None:
    fallen = falls(KEY, ROWS, POSITIONS, CHANNELS, rate).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(fallen.mean().item() - rate) < 5 * spread / fallen.numel() ** 0.5
    for dim in range(3):
        rest = [one for one in range(3) if one != dim]
        means = fallen.mean(dim=rest)
        assert (means - rate).abs().max() < 5 * spread / (fallen.numel() / len(means)) ** 0.5


def test_neighbours_and_other_keys_are_strangers() -> None:
    rate = 0.3
    first = falls(KEY, ROWS, POSITIONS, CHANNELS, rate).double() - rate
    scale = rate * (1 - rate)
    for dim in range(3):
        for step in (1, 2, 16):
            size = first.shape[dim] - step
            both = first.narrow(dim, 0, size) * first.narrow(dim, step, size)
            assert abs(both.mean().item() / scale) < 5 / both.numel() ** 0.5
    other = falls(KEY[::-1], ROWS, POSITIONS, CHANNELS, rate).double() - rate
    assert abs((first * other).mean().item() / scale) < 5 / first.numel() ** 0.5


def test_a_part_of_the_batch_sees_its_part_of_what_falls() -> None:
    whole = falls(KEY, ROWS, POSITIONS, CHANNELS, 0.3)
    rows, positions = torch.tensor([3, 30]), torch.tensor([0, 7, 63])
    part = falls(KEY, rows, positions, CHANNELS, 0.3)
    assert torch.equal(part, whole[rows][:, positions])


def test_it_drops_in_training_only_and_keeps_the_mean() -> None:
    config = ModelConfig(layers=1, width=64, heads=4, kv_heads=2, mlp=48)
    model = Transformer(config)
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(initial_value(path, p.shape, 1, 0))
    ids = torch.arange(64).view(2, 32)
    plain = model.embed(ids)
    now = Passing(0, torch.arange(32), first=0, samples=2)
    install(model, 0.0, now)
    assert torch.equal(model.embed(ids), plain)
    assert not any(module._forward_hooks for module in model.modules())
    install(model, 0.5, now)
    hooked = [path for path, module in model.named_modules() if module._forward_hooks]
    assert hooked == ["embed", "layers.0.attention", "layers.0.mlp"]
    first = model.embed(ids)
    kept = first != 0
    assert torch.equal(first[kept], 2 * plain[kept])
    assert torch.equal(model.embed(ids), first)
    now.microbatch = 1
    assert not torch.equal(model.embed(ids), first)
    now.microbatch, now.step = 0, 1
    assert not torch.equal(model.embed(ids), first)
    model.eval()
    assert torch.equal(model.embed(ids), plain)
