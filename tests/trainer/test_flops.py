"""MFU's numerator against torch's own counter of FLOPs; its denominator by name, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer import flops
from trainer.config import ModelConfig
from trainer.model import NextTokenLoss, Transformer

TINY = ModelConfig(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, mlp=48)


@pytest.mark.parametrize(
    "model", [TINY, replace(TINY, experts=4, top_k=2)], ids=["dense", "experts"]
)
def test_the_numerator_is_what_torch_counts_in_forward_and_backward(model: ModelConfig) -> None:
    """torch counts the whole square of attention; the formula is then told whole squares."""
    samples, length = 2, 16
    network = Transformer(model)
    tokens = torch.randint(0, 64, (samples, length))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        NextTokenLoss()(network(tokens), tokens).backward()
    ours = flops.of_step(model, samples * length, samples * length**2)
    assert ours == counter.get_total_flops()


def test_a_model_of_the_users_has_no_numerator() -> None:
    assert flops.of_step(ModelConfig(file="mine.py"), 32, 100) is None


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "float16", 756),
        ("NVIDIA H200", "float32", 67),
        ("NVIDIA A100-SXM4-80GB", "float64", 19.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989.5),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bfloat16", None),
        ("NVIDIA L40S", "float64", None),
        ("GeForce of next year", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_a_peak_is_known_or_none(name: str, dtype: str, tera: float | None) -> None:
    assert flops.peak(name, dtype) == (tera and tera * 1e12)
