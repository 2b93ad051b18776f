"""Scaled, skipped, rounded and shared gradients: on every axis what one process does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.trainer.pool import Case, Pool, whole
from trainer.parity.bounds import bounds
from trainer.parity.cases import FIXED, SMALL
from trainer.parity.compare import compare

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.parity.outcome import Part

pytestmark = pytest.mark.ranks

CLOSE = bounds("float64", 30)
BASE = (*SMALL, *FIXED, "eval.every=0")
EXACT = (*BASE, "train.dtype=float64")
EXPERTS = ("model.experts=4", "model.balance=0.1")


@pytest.fixture(scope="module")
def exact() -> Part:
    return whole(Case(EXACT))


def losses(parts: list[Part]) -> np.ndarray:
    return np.array(parts[0].losses)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (("parallel.tp=2", "parallel.pp=2", "parallel.sp=true"), ()),
        (("parallel.dp=4", "parallel.zero=3", "parallel.replicate=2"), ()),
        (("parallel.dp=2", "parallel.ep=2"), EXPERTS),
    ],
    ids=["tp2 sp pp2", "hybrid zero3", "experts with a balance loss"],
)
def test_a_scaled_loss_gives_the_same_gradients_norms_and_weights(
    layout: tuple[str, ...], model: tuple[str, ...], pool: Pool, exact: Part
) -> None:
    true = whole(Case((*EXACT, *model))) if model else exact
    world = 2 if model else 4
    verdict = compare(pool.run(Case((*EXACT, *model, *layout), "scaled", world)), true, CLOSE)
    assert verdict.first is None, str(verdict.first)


def test_clipping_before_unscaling_is_seen(pool: Pool, exact: Part) -> None:
    case = Case((*EXACT, "parallel.dp=2"), "clip before unscale", 2)
    verdict = compare(pool.run(case), exact, CLOSE)
    assert verdict.first is not None
    assert verdict.first.what == "gradient at step 0"
    assert verdict.worst.relative > 0.5


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp=2",),
        ("parallel.pp=2",),
        ("parallel.dp=2",),
        ("parallel.cp=2",),
        ("parallel.dp=2", "parallel.zero=2"),
        ("parallel.dp=2", "parallel.zero=3", "memory.offload=parameters"),
    ],
    ids=["tp", "pp", "dp", "cp", "zero2", "zero3 on the host"],
)
def test_an_overflow_on_one_rank_is_skipped_by_all(layout: tuple[str, ...], pool: Pool) -> None:
    """Else that rank alone would keep its weights, and replicas drift apart in silence."""
    true = whole(Case(EXACT, "overflow on one rank"))
    parts = pool.run(Case((*EXACT, *layout), "overflow on one rank", 2))
    held = [one.values for one in parts[1].steps[1].clipped.values()]
    assert sum(np.isinf(one).sum() for one in held) == 1
    if "parallel.tp=2" in layout:
        assert np.isfinite(parts[0].steps[1].norm), "the norm of counted elements does not see it"
    for part in (true, *parts):
        told = part.extra.values
        assert [one["skipped_steps"] for one in told] == [0, 1, 1]
        assert [one["loss_scale"] for one in told] == [65536.0, 65536.0, 32768.0]
        del part.steps[1]  # of which the gradients are not finite; the step after shows its weights
    verdict = compare(parts, true, CLOSE)
    assert verdict.first is None, str(verdict.first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp=4",),
        ("parallel.dp=4", "parallel.zero=1"),
        ("parallel.dp=4", "parallel.zero=2", "parallel.replicate=2"),
        ("parallel.dp=4", "parallel.zero=3"),
    ],
    ids=["ddp", "zero1", "hybrid zero2", "zero3"],
)
def test_the_reduce_dtype_rounds_what_travels(
    layout: tuple[str, ...], dtype: str, pool: Pool
) -> None:
    half = (*BASE, *layout, f"train.dtype={dtype}", "optim.clip=0", "train.microbatch=2")
    wide = losses(pool.run(Case(half)))
    narrow = losses(pool.run(Case((*half, f"train.reduce_dtype={dtype}"))))
    assert wide[0] == narrow[0], "the first loss is before any sum of gradients"
    assert (wide[1:] != narrow[1:]).any()
    assert np.allclose(wide, narrow, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp=2", "parallel.pp=2"),
        ("parallel.dp=2", "parallel.cp=2", "parallel.zero=3"),
        ("parallel.pp=2", "parallel.zero=3", "memory.offload=parameters"),
    ],
    ids=["tp2 pp2", "dp2 cp2 zero3", "pp2 zero3 on the host"],
)
def test_half_precision_stays_near_on_every_axis(
    layout: tuple[str, ...], dtype: str, pool: Pool, exact: Part
) -> None:
    parts = pool.run(Case((*BASE, f"train.dtype={dtype}", *layout)))
    assert np.allclose(losses(parts), exact.losses, rtol=5e-3)
    assert np.allclose(parts[0].norms, exact.norms, rtol=5e-2)


PLAIN = """
from torch import nn

class Plain(nn.Sequential):
    width = 32

    def chain(self):
        return list(self.named_children())

def model():
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(4)]
    return Plain(nn.Embedding(256, 32), *layers, nn.Linear(32, 256))
"""


@pytest.mark.parametrize("zero", ["parallel.dp=2", "parallel.zero=3"])
def test_stages_agree_on_a_dtype_where_products_stand_at_their_ends(
    zero: str, pool: Pool, tmp_path: Path
) -> None:
    """Autocast gives such a stage's output in 16 bits, and the next one waits for 32."""
    file = tmp_path / "plain.py"
    file.write_text(PLAIN)
    base = (*BASE, f"model.file={file}", "train.dtype=bfloat16")
    true = whole(Case(base))
    parts = pool.run(Case((*base, "parallel.pp=2", zero)))
    assert np.allclose(losses(parts), true.losses, rtol=1e-3)


def test_hybrid_groups_are_told_as_data_parallel_neighbours_share(pool: Pool) -> None:
    layout = ("parallel.dp=4", "parallel.zero=2", "parallel.replicate=2")
    parts = pool.run(Case((*EXACT, *layout)))
    for part in parts:
        assert list(part.extra.groups.values()) == ["dp"] * 3  # all, who shares, who holds the same
    held = [{path: one.place for path, one in part.steps[0].gradients.items()} for part in parts]
    assert held[0] == held[2] != held[1] == held[3], "ranks 0 and 1 share, 0 and 2 hold the same"
