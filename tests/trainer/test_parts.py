"""Buckets, learning rate and clipping, each on its own in one process."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import nn

from trainer import optim
from trainer.config import OptimConfig
from trainer.mesh import Axis, Mesh
from trainer.parallel.ddp import GradientBuckets
from trainer.parallel.unit import Group, Sharing
from trainer.parallel.zero import ShardedReplicas


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))


class Wire:
    """Stands for the network: notes each all-reduce, and what was in it when it left."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.waited = 0

    def all_reduce(self, tensor: torch.Tensor, **_: object) -> Wire:
        self.sent.append(tensor.numel())
        return self

    def wait(self) -> None:
        self.waited += 1


def test_each_bucket_leaves_once_a_step_and_during_the_last_backward() -> None:
    model, wire = layers(), Wire()
    axis = Axis("dp", 2, 0, (0, 1), group=mock.sentinel.group)
    buckets = GradientBuckets(
        list(model.parameters()), axis, bucket_bytes=2 * 256, passes=3, wire=torch.float32
    )
    with mock.patch("trainer.mesh.dist.all_reduce", wire.all_reduce):
        for _ in range(2):
            wire.sent.clear()
            buckets.start()
            for microbatch in range(3):
                assert wire.sent == [], f"sent before microbatch {microbatch}"
                model(torch.ones(2, 8)).sum().backward()
            assert wire.sent == [128, 128]
            buckets.finish()
            assert wire.sent == [128, 128]
    assert wire.waited == 4


def test_a_parameter_without_gradient_does_not_hold_back_the_others() -> None:
    model, wire = layers(), Wire()
    axis = Axis("dp", 2, 0, (0, 1), group=mock.sentinel.group)
    buckets = GradientBuckets(
        list(model.parameters()), axis, bucket_bytes=1, passes=1, wire=torch.float32
    )
    with mock.patch("trainer.mesh.dist.all_reduce", wire.all_reduce):
        buckets.start()
        model[0](torch.ones(2, 8)).sum().backward()
        assert wire.sent == []
        buckets.finish()
    assert wire.sent == [64] * 4
    assert torch.equal(model[3].weight.grad, torch.zeros(8, 8))


def test_accumulated_gradients_lie_in_the_buckets() -> None:
    model = layers()
    buckets = GradientBuckets(
        list(model.parameters()),
        Axis("dp", 1, 0, (0,), None),
        bucket_bytes=10_000,
        passes=2,
        wire=torch.float32,
    )
    for _ in range(2):
        buckets.start()
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        buckets.finish()
    ours = torch.cat([p.grad.flatten() for p in reversed(list(model.parameters()))])
    assert torch.equal(ours, buckets.buckets[0].flat)
    alone = layers()
    model_sum = sum(alone(torch.ones(2, 8)).sum() for _ in range(2))
    model_sum.backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad)


def gradients(*values: float) -> dict[str, nn.Parameter]:
    parameters = {}
    for i, value in enumerate(values):
        parameters[f"p{i}"] = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameters[f"p{i}"].grad = torch.full((1,), value, dtype=torch.float64)
    return parameters


def test_clipping_scales_down_only() -> None:
    parameters = gradients(3.0, 4.0)
    optim.clip(parameters, torch.tensor(5.0), 10.0)
    optim.clip(parameters, torch.tensor(5.0), 0.0)
    assert [p.grad.item() for p in parameters.values()] == [3.0, 4.0]
    optim.clip(parameters, torch.tensor(5.0), 1.0)
    assert [p.grad.item() for p in parameters.values()] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("dp", "tp", "want"), [(0, 0, 25.0), (0, 1, 16.0), (1, 0, 0.0), (1, 1, 0.0)]
)
def test_each_element_is_counted_by_one_rank(dp: int, tp: int, want: float) -> None:
    axes = {
        "pp": Axis("pp", 2, 1, (0, 1), None),
        "dp": Axis("dp", 2, dp, (0, 1), None),
        "tp": Axis("tp", 2, tp, (0, 1), None),
    }
    mesh = Mesh(
        axes=axes,
        rank=0,
        world=8,
        data=axes["dp"],
        ep=Axis("ep", 1, 0, (0,), None),
        expert_data=axes["dp"],
        shard=axes["dp"],
        replica=Axis("dp", 1, 0, (0,), None),
        expert_shard=axes["dp"],
        expert_replica=Axis("dp", 1, 0, (0,), None),
    )
    parameters = gradients(3.0, 4.0)
    square = optim.own_square(parameters, {"p1": frozenset({"tp"})}, mesh)
    assert math.isclose(square.item(), want, abs_tol=1e-12)


def test_matrices_decay_and_vectors_do_not() -> None:
    parameters = {
        "matrix": nn.Parameter(torch.ones(2, 2)),
        "norm": nn.Parameter(torch.ones(2)),
    }
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    shapes = {path: p.shape for path, p in parameters.items()}
    optim.adamw(parameters, OptimConfig(lr=0.5, weight_decay=0.1), shapes).step()
    assert torch.allclose(parameters["matrix"], torch.full((2, 2), 0.95))
    assert torch.equal(parameters["norm"], torch.ones(2))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_zero_shares_what_its_stage_says(stage: int, index: int) -> None:
    model = layers()
    before = [p.detach().clone() for p in model.parameters()]
    axis = Axis("dp", 3, index, (0, 1, 2), group=None)
    replica = Axis("dp", 1, 0, (0,), group=None)
    groups = [
        Group([(f"{i}.weight", layer.weight)], axis, replica) for i, layer in enumerate(model)
    ]
    shared = ShardedReplicas(groups, Sharing(stage, torch.float32), passes=1)
    for (path, piece), whole in zip(shared.pieces.items(), before, strict=True):
        start = shared.starts[path]
        assert torch.equal(piece.detach(), whole.flatten()[start : start + piece.numel()])
        assert start == 22 * index
    assert sum(p.numel() for p in shared.pieces.values()) == 4 * (22 if index < 2 else 20)
    kept = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert kept == (0 if stage == 3 else 4 * 66 * 4)
    shared.start()
    gradients = [p.grad for p in model.parameters()]
    assert all((one is None) == (stage > 1) for one in gradients)
