"""A backward in halves is the backward: the same gradients, as much work, and hooks that count."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import ModelConfig
from trainer.model import Block, initial_value
from trainer.parallel.halves import Halves
from trainer.parallel.recompute import Keep, run

if TYPE_CHECKING:
    from collections.abc import Callable

TINY = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp=48, norm="layernorm")
CPU = torch.device("cpu")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """One matrix is embedding and head, another is used twice, and one input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.place = nn.Linear(4, 8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.eye(4, dtype=torch.float64)[ids % 4])
        out: Tensor = self.head(self.twice(torch.tanh(self.twice(x))))
        return out


def block() -> tuple[nn.Module, Tensor]:
    model = Block(TINY).double()
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(initial_value(path, p.shape, TINY.layers, 0))
    generator = torch.Generator().manual_seed(1)
    return model, torch.randn(2, 6, 32, dtype=torch.float64, generator=generator).requires_grad_()


def tied() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tied().double(), torch.arange(12).view(2, 6)


@pytest.mark.parametrize("make", [block, tied])
@pytest.mark.parametrize("kept", Keep)
def test_gradients_are_those_of_one_backward_and_come_in_the_second_half(
    make: Callable[[], tuple[nn.Module, Tensor]], kept: Keep
) -> None:
    plain, x = make()
    out = plain(x)
    slope = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    with Products() as once:
        plain(x).backward(slope)

    ours, y = make()
    heard: Counter[str] = Counter()
    for path, p in ours.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _p, path=path: heard.update([path]))
    halves = Halves({3: [ours]}, CPU)
    with Products() as both:
        outs = [run(ours, (y,), kept) for _ in range(2)]
        for number, one in enumerate(outs):
            halves.input_gradient((3, number), one, slope, y)
        assert not heard
        assert all(p.grad is None for p in ours.parameters())
        if x.requires_grad:
            assert torch.allclose(y.grad, x.grad, rtol=1e-12)
        for number in range(2):
            halves.weight_gradient((3, number))
    assert heard == {path: 2 for path, _ in ours.named_parameters()}
    for (path, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, 2 * q.grad, rtol=1e-12, atol=1e-15), path
    if kept is not Keep.INPUT:
        assert both.number == 2 * once.number, "something was multiplied twice"


def test_bfloat16_products_give_gradients_as_autocast_does() -> None:
    def train(*, in_halves: bool) -> list[Tensor]:
        model, x = block()
        model, x = model.float(), x.detach().float().requires_grad_()
        halves = Halves({0: [model]}, CPU) if in_halves else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        if halves:
            halves.input_gradient((0, 0), out, torch.ones_like(out), x)
            halves.weight_gradient((0, 0))
        else:
            out.backward(torch.ones_like(out))
        return [x.grad, *(p.grad for p in model.parameters())]

    for ours, plain in zip(train(in_halves=True), train(in_halves=False), strict=True):
        assert ours.dtype == plain.dtype == torch.float32
        assert torch.allclose(ours, plain, rtol=2e-2, atol=2e-2 * plain.abs().max().item())


def test_nothing_is_held_once_both_halves_are_done() -> None:
    model, x = block()
    halves = Halves({0: [model]}, CPU)
    out = model(x)
    halves.input_gradient((0, 0), out, torch.ones_like(out), x)
    assert halves._products
    halves.weight_gradient((0, 0))
    assert not halves._products
    assert not halves._made
    assert not halves._owed.products
