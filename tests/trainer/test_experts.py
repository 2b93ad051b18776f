"""Routing, capacity and balance on known answers, in one process; who shares experts with whom."""

from __future__ import annotations

import math

import pytest
import torch

from collectors import annotate
from tests.trainer.recorder import Recorder
from trainer import banner, progress
from trainer.config import ModelConfig
from trainer.groups import divide, ep_is_far, rows
from trainer.loop import Trainer
from trainer.mlp import MixtureOfExperts, Router, count, queue_places
from trainer.model import Transformer, initial_value
from trainer.parallel.expert import ExpertLoad, load_of, take_load
from trainer.settings import load

CPU = torch.device("cpu")
TINY = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "mlp": 8, "experts": 4}
SETTINGS = (
    "train.device=cpu",
    "train.global_batch=4",
    "train.microbatch=2",
    "train.sequence=32",
    *(f"model.{key}={value}" for key, value in TINY.items()),
)


def config(**changed: float) -> ModelConfig:
    return ModelConfig(**{**TINY, **changed})


def router(scores: list[list[float]], **changed: float) -> tuple[Router, torch.Tensor]:
    """A router, and an input of one sample, whose scores are these: (tokens, experts)."""
    wanted = torch.tensor(scores, dtype=torch.float64)
    made = Router(config(width=wanted.shape[1], experts=wanted.shape[1], **changed)).double()
    with torch.no_grad():
        made.weight.copy_(torch.eye(wanted.shape[1]))
    return made, wanted[None].requires_grad_()


def layer(**changed: float) -> MixtureOfExperts:
    made = MixtureOfExperts(config(**changed)).double()
    with torch.no_grad():
        for path, p in made.named_parameters():
            p.copy_(20 * initial_value(path, p.shape, 2, 0))
    return made


def text(width: int = 16, tokens: int = 12, batch: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, tokens, width, dtype=torch.float64, generator=generator)


def test_the_best_experts_are_chosen_and_count_their_probability() -> None:
    made, x = router([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]], balance=0)
    choice, weights = made(x)
    assert choice.tolist() == [[[1, 2], [0, 1]]]  # of equal ones the first
    total = math.exp(0) + math.exp(2) + math.exp(1) + math.exp(-1)
    assert weights[0, 0].tolist() == pytest.approx([math.exp(2) / total, math.exp(1) / total])


def test_a_layer_is_the_weighted_sum_of_its_experts() -> None:
    made, x = layer(top_k=3), text()
    choice, weights = made.router(x)
    want = torch.zeros_like(x)
    for batch in range(3):
        for at in range(12):
            for expert, weight in zip(choice[batch, at], weights[batch, at], strict=True):
                want[batch, at] += weight * made.experts[str(int(expert))](x[batch, at])
    assert torch.allclose(made(x), want, rtol=1e-12)


def test_places_go_by_position_and_what_finds_none_is_dropped() -> None:
    # capacity 1 x top 1 x 6 tokens / 2 experts: three places each; the fourth of expert 0 has none
    first, second = [1.0, 0.0], [0.0, 1.0]
    made, x = router([first, first, second, first, first, second], top_k=1, capacity=1, balance=0)
    choice, _ = made(x)
    assert made.slots(6) == 3
    assert choice.flatten().tolist() == [0, 0, 1, 0, 2, 1]
    assert made.load is not None
    assert made.load.tolist() == [4, 2, 1]


def test_a_dropped_token_passes_by() -> None:
    made, x = layer(top_k=1, capacity=0.1), text()
    choice, _ = made.router(x)
    dropped = (choice == 4).all(dim=-1)
    assert 0 < dropped.sum() < dropped.numel()
    out = made(x)
    assert (out[dropped] == 0).all()
    assert (out[~dropped] != 0).any(dim=-1).all()


@pytest.mark.parametrize("capacity", [0, 0.7])
def test_a_sample_is_routed_alike_whatever_stands_beside_it(capacity: float) -> None:
    made, x = layer(capacity=capacity), text()
    together = made(x)
    for one in range(3):
        assert torch.allclose(made(x[one : one + 1]), together[one : one + 1], rtol=1e-12)


def test_no_position_sees_what_comes_after_even_when_places_are_few() -> None:
    model = Transformer(config(capacity=0.5)).double()
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(initial_value(path, p.shape, 2, 0))
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(4))
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    ours, others = model(ids), model(changed)
    assert torch.equal(ours[:, :7], others[:, :7])
    assert not torch.allclose(ours[:, 7:], others[:, 7:])


def balance_of(made: Router, x: torch.Tensor) -> torch.Tensor:
    """The balance loss of one sample, from its formula."""
    probabilities = made.score(x).softmax(dim=-1)[0]
    chosen = probabilities.topk(made.top_k).indices.flatten().bincount(minlength=made.number)
    share = chosen / (made.top_k * probabilities.shape[0])
    return made.balance * made.number * (share * probabilities.mean(dim=0)).sum()


def test_the_gradient_of_the_balance_is_that_of_its_formula() -> None:
    scores = torch.randn(9, 4, generator=torch.Generator().manual_seed(6)).tolist()
    made, x = router(scores, balance=0.5)
    _, weights = made(x)
    (weights.sum() * 0).backward()
    ours, ours_x = made.weight.grad.clone(), x.grad.clone()
    made.weight.grad = x.grad = None
    balance_of(made, x).backward()
    assert torch.allclose(ours, made.weight.grad, rtol=1e-12)
    assert torch.allclose(ours_x, x.grad, rtol=1e-12)
    assert ours.abs().max() > 1e-4


def test_an_even_load_has_balance_one_and_a_collapsed_one_the_number_of_experts() -> None:
    even, x = router([[50.0 if i == j else 0.0 for j in range(4)] for i in range(4)],
                     top_k=1, balance=1)  # fmt: skip
    assert balance_of(even, x).item() == pytest.approx(1)
    collapsed, x = router([[50.0, 0.0, 0.0, 0.0]] * 4, top_k=1, balance=1)
    assert balance_of(collapsed, x).item() == pytest.approx(4)


def test_the_balance_evens_the_load() -> None:
    """Else a weight would be a number without effect."""

    def peak(balance: float) -> float:
        made, x = layer(balance=balance, top_k=1), text(batch=8, tokens=32)
        made.router.adjust = lambda scores: scores + torch.tensor([4.0, 0.0, 0.0, 0.0])
        descent = torch.optim.SGD(made.router.parameters(), lr=0.5)
        for _ in range(60):
            descent.zero_grad()
            (made(x).sum() * 0).backward()
            descent.step()
        take_load([made.router], CPU)
        made(x)
        return load_of([made.router], take_load([made.router], CPU).tolist())[0].peak

    assert peak(1.0) < peak(0.0) - 0.5


def test_scores_are_never_computed_in_16_bits() -> None:
    made = MixtureOfExperts(config())
    x = text().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, weights = made.router(x)
        out = made(x)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, made.router(x)[1])
    true = made(x).detach()
    assert torch.allclose(out, true, atol=2e-2 * true.abs().max().item())


def test_the_loss_scale_of_float16_holds_for_the_balance_too() -> None:
    def gradient(dtype: str) -> torch.Tensor:
        settings = ("train.steps=1", "model.balance=5", "optim.clip=0", f"train.dtype={dtype}")
        run = Trainer(load([*SETTINGS, *settings], 1), 1, CPU)
        run.step(0)
        return torch.cat([router.weight.grad.flatten() for router in run.built.routers])

    true = gradient("float32")
    assert torch.allclose(gradient("float16"), true, atol=0.02 * true.abs().max().item())


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    """Those who wait for it, to sum it over replicas, would wait forever."""
    made = layer(top_k=1)
    made.router.adjust = lambda scores: scores + torch.tensor([100.0, 0.0, 0.0, 0.0])
    made(text()).sum().backward()
    assert all((p.grad != 0).any() for p in made.experts["0"].parameters())
    for number in "123":
        assert all((p.grad == 0).all() for p in made.experts[number].parameters())


def test_counts_and_places() -> None:
    numbers = torch.tensor([[2, 0, 2, 2, 0], [1, 1, 1, 1, 1]])
    assert count(numbers, 3).tolist() == [[2, 0, 3], [0, 5, 0]]
    assert queue_places(numbers, 3).tolist() == [[0, 0, 1, 2, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("order", "ep", "copies"),
    [
        (("pp", "dp", "cp", "tp"), [[0, 2], [4, 6], [1, 3], [5, 7]],
         [[0, 4], [2, 6], [1, 5], [3, 7]]),
        (("pp", "ep", "dp", "cp", "tp"), [[0, 4], [2, 6], [1, 5], [3, 7]],
         [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ],
    ids=["near", "far"],
)  # fmt: skip
def test_who_shares_experts(
    order: tuple[str, ...], ep: list[list[int]], copies: list[list[int]]
) -> None:
    data = rows({"pp": 1, "dp": 2, "cp": 2, "tp": 2}, ("dp", "cp"))
    assert data == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert divide(data, 2, far=ep_is_far(order)) == (ep, copies)


def test_the_load_of_a_step_is_told_and_shown() -> None:
    heard = Recorder()
    annotate.listen(heard)
    run = Trainer(load([*SETTINGS, "train.steps=2", "memory.checkpoint=full"], 1), 1, CPU)
    results = [run.step(number) for number in range(2)]
    annotate.listen(None)
    assert [(step, layer) for step, layer, _, _ in heard.loads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for _, _, shares, dropped in heard.loads:
        assert sum(shares) == pytest.approx(1)
        assert dropped == 0
    assert [one.shares for one in results[1].load] == [
        shares for _, _, shares, _ in heard.loads[2:]
    ]
    peak = max(one.peak for one in results[1].load)
    assert progress.line([results[1]], 2).endswith(f"expert load {peak:.1f}x")
    assert "4 a layer, 4 a rank over ep 1" in banner.banner(run, [run.built.whole])


def test_an_evaluation_counts_for_nobodys_load() -> None:
    def loads(*settings: str) -> list[tuple[ExpertLoad, ...]]:
        run = Trainer(load([*SETTINGS, "train.steps=2", *settings], 1), 1, CPU)
        return [run.step(number).load for number in range(2)]

    assert loads("eval.every=1", "eval.batches=2") == loads("eval.every=2", "eval.batches=2")


def test_loss_falls_and_the_load_evens_out() -> None:
    run = Trainer(load([*SETTINGS, "train.steps=60", "model.balance=0.1"], 1), 1, CPU)
    results = [run.step(number) for number in range(60)]
    assert sum(one.loss for one in results[-5:]) / 5 < results[0].loss - 1.5
    assert max(one.peak for one in results[-1].load) < 2.0


def test_collapse_and_overflow_can_be_made_and_are_seen() -> None:
    run = Trainer(load([*SETTINGS, "train.steps=1", "model.capacity=1"], 1), 1, CPU)
    for router in run.built.routers:
        router.adjust = lambda scores: scores + torch.tensor([30.0, 20.0, 0.0, 0.0])
    (first, second) = run.step(0).load
    for one in (first, second):
        assert one.shares == (0.5, 0.5, 0.0, 0.0)
        assert one.peak == 2.0
        assert one.dropped == 0.5  # 32 tokens want 16 places at each of two experts
