"""What a layer keeps is what was asked for, and changes no bit of any gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import ModelConfig
from trainer.model import Block, NextTokenLoss, initial_value
from trainer.parallel.balance import Bench, measure
from trainer.parallel.recompute import Keep, keep, run
from trainer.parallel.stopwatch import Stopwatch, bubble

TINY = ModelConfig(layers=4, width=32, heads=4, kv_heads=2, mlp=48)


class Products(TorchDispatchMode):
    """Counts products of matrices, and of batches of them."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.plain += func is torch.ops.aten.mm.default
        self.attention += "scaled_dot_product" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


def block() -> nn.Module:
    model = Block(TINY).double()
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(initial_value(path, p.shape, TINY.layers, 0))
    return model


def train(kept: Keep) -> tuple[list[Tensor], Products, Products]:
    """Gradients, and what forward and backward multiplied."""
    model = block()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 32, dtype=torch.float64, generator=generator).requires_grad_()
    with Products() as forward:
        out = run(model, (x,), kept)
    with Products() as backward:
        out.square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], forward, backward


def test_gradients_are_the_same_bits_and_only_what_is_cheap_comes_twice() -> None:
    whole, forward, backward = train(Keep.ALL)
    assert (forward.plain, forward.attention) == (7, 1)
    assert (backward.plain, backward.attention) == (14, 0)
    selective, _, again = train(Keep.PRODUCTS)
    assert (again.plain, again.attention) == (14, 1), "products are kept, attention is not"
    full, _, twice = train(Keep.INPUT)
    assert twice.attention == 1
    assert 14 + 6 <= twice.plain <= 14 + 7, "the last product is needed by nothing"
    for others in (selective, full):
        assert all(torch.equal(one, other) for one, other in zip(whole, others, strict=True))


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("none",), "AAAA"),
        (("full",), "IIII"),
        (("selective",), "PPPP"),
        (("every-3",), "IAAI"),
        (("selective", "every-3"), "PPAI"),
        (("none", "full"), "AAII"),
    ],
)
def test_words_name_layers_by_stage(words: tuple[str, ...], kept: str) -> None:
    found = [keep(f"layers.{at}", words, stage=at // 2).name[0] for at in range(4)]
    assert "".join(found) == kept
    assert keep("embed", words, 0) is keep("head", words, 1) is Keep.ALL


def test_a_measurement_tells_what_stays_and_leaves_nothing_behind() -> None:
    """Parts alike are measured once; a layer that keeps less is seen to keep less."""
    from trainer.layout import Layout
    from trainer.mesh import build

    cpu = torch.device("cpu")
    mesh = build(Layout(dp=1, tp=1, pp=1), ("pp", "dp", "tp"), cpu, 1.0)
    kinds = {"layers.0": Keep.ALL, "layers.1": Keep.PRODUCTS, "layers.2": Keep.INPUT}
    parts = {"embed": nn.Embedding(256, 32), **{path: Block(TINY) for path in kinds}}
    filled: list[str] = []

    def occupy(path: str, part: nn.Module) -> None:
        filled.append(path)
        part.to_empty(device=cpu)
        for p in part.parameters():
            nn.init.constant_(p, 0.01)

    bench = Bench(
        chain={**parts, "layers.3": Block(TINY), "head": nn.Linear(32, 256, bias=False)},
        device=cpu, autocast=None, samples=2, positions=8, shards=1, width=32, vocabulary=256,
        loss=NextTokenLoss(), keep=lambda path: kinds.get(path, Keep.ALL), copies=4.0,
        occupy=occupy,
    )  # fmt: skip
    loads = measure(bench, mesh)
    assert filled == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert loads.layers[3] == loads.layers[0]
    assert all(one.seconds > 0 for one in (*loads.first, *loads.layers, *loads.last))
    entry = 2 * 8 * 32 * 4
    products = 2 * 8 * 4 * (32 + 2 * 16 + 32 + 2 * 48 + 32)
    kept = [one.activations for one in loads.layers[:3]]
    assert kept[1:] == [entry + products, entry]
    assert kept[0] > kept[1]
    assert loads.layers[0].state == 4 * 4 * sum(p.numel() for p in block().parameters())
    assert all(p.is_meta for path in filled for p in bench.chain[path].parameters())


def test_the_bubble_is_what_a_pipeline_did_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 5.0, 6.0])
    watch = Stopwatch(torch.device("cpu"))
    assert watch.read().span == 0.0
    monkeypatch.setattr("trainer.parallel.stopwatch.time.perf_counter", lambda: next(clock))
    watch.start()
    for _ in range(4):
        watch.mark()
    assert (watch.read().busy, watch.read().span) == (3.0, 6.0)
    assert bubble(3.0 + 4.0, 6.0, ranks=2) == pytest.approx(1 - 7 / 12)
    assert bubble(0.0, 0.0, ranks=1) is None
    watch.start()
    assert watch.read().busy == 0.0
