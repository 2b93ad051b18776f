"""Experts shared over ranks give what one process gives; planted bugs of theirs are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.trainer.pool import Case, Pool, whole
from trainer.parity.bounds import bounds
from trainer.parity.cases import FIXED, SMALL
from trainer.parity.compare import compare

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.parity.outcome import Part

pytestmark = pytest.mark.ranks

EXACT = bounds("float64", 30)
INTERLEAVED = ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual=2")
EP2 = ("parallel.ep=2",)
DROPLESS = ("model.experts=4",)
CAPACITY = ("model.experts=4", "model.capacity=0.75", "model.balance=0.5")
LAYOUTS = {
    "ep4": (CAPACITY, ("parallel.ep=4",)),
    "ep2 dp2": (DROPLESS, EP2),
    "ep2 dp2, far": (CAPACITY, (*EP2, "mesh.order=pp,ep,dp,tp")),
    "ep2 dp2, larger microbatches": (CAPACITY, (*EP2, "train.microbatch=2")),
    "ep2 zero1": (CAPACITY, (*EP2, "parallel.zero=1")),
    "ep2 zero2": (DROPLESS, (*EP2, "parallel.zero=2")),
    "ep2 zero3, checkpointed": (
        CAPACITY,
        (*EP2, "parallel.zero=3", "memory.checkpoint=full"),
    ),
    "ep4 zero3": (DROPLESS, ("parallel.ep=4", "parallel.zero=3")),
    "ep2 tp2": (CAPACITY, (*EP2, "parallel.tp=2")),
    "ep2 tp2 sp": (CAPACITY, (*EP2, "parallel.tp=2", "parallel.sp=true")),
    "ep2 pp2": (CAPACITY, (*EP2, "parallel.pp=2")),
    "ep2 pp2 interleaved": (DROPLESS, (*EP2, *INTERLEAVED)),
    "ep2 cp2": (CAPACITY, (*EP2, "parallel.cp=2")),
    "ep4 cp2, all-gather": (
        CAPACITY,
        ("parallel.ep=4", "parallel.cp=2", "parallel.cp_form=all-gather"),
    ),
    "cp4 without ep": (CAPACITY, ("parallel.cp=4",)),
    "tp2 sp pp2 without ep": (
        CAPACITY,
        ("parallel.tp=2", "parallel.sp=true", "parallel.pp=2"),
    ),
}


@pytest.fixture(scope="module")
def base(text: Path) -> tuple[str, ...]:
    return (*SMALL, *FIXED, "train.dtype=float64", "eval.held=0.1", f"data.path={text}")


@pytest.fixture(scope="module")
def references(base: tuple[str, ...]) -> dict[tuple[str, ...], Part]:
    """What one process comes to, by model."""
    return {model: whole(Case((*base, *model))) for model in (DROPLESS, CAPACITY)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_equal_one_process(
    layout: str,
    pool: Pool,
    base: tuple[str, ...],
    references: dict[tuple[str, ...], Part],
) -> None:
    model, settings = LAYOUTS[layout]
    ours = pool.run(Case((*base, *model, *settings)))
    verdict = compare(ours, references[model], EXACT)
    assert verdict.first is None, str(verdict.first)
    loads = references[model].extra.loads
    assert len(loads) == 3 * 4
    for part in ours:
        assert [one[:2] for one in part.extra.loads] == [one[:2] for one in loads]
        for mine, true in zip(part.extra.loads, loads, strict=True):
            assert mine[2] == pytest.approx(true[2])
            assert mine[3] == pytest.approx(true[3])


def test_tokens_are_dropped_in_these_tests(references: dict[tuple[str, ...], Part]) -> None:
    """Else capacity would be proved on nothing."""
    assert all(dropped > 0.2 for *_, dropped in references[CAPACITY].extra.loads)
    assert all(dropped == 0 for *_, dropped in references[DROPLESS].extra.loads)


@pytest.mark.parametrize(
    ("bug", "layout", "what", "name"),
    [
        ("router gradient reduced twice", ("parallel.dp=4",), "gradient", "layers.3.mlp.router"),
        ("expert gradient over all of dp", EP2, "gradient", "layers.3.mlp.experts.3.down"),
        ("balance once a tp rank", ("parallel.tp=4",), "gradient", "layers.3.mlp.router"),
        ("router gradient of a part", ("parallel.tp=4",), "gradient", "layers.3.mlp.router"),
        ("places by each cp rank alone", ("parallel.cp=2",), "loss", None),
        ("norm counts replicas", EP2, "gradient norm", None),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_planted_bug_of_experts_is_seen_and_named(
    bug: str,
    layout: tuple[str, ...],
    what: str,
    name: str | None,
    pool: Pool,
    base: tuple[str, ...],
    references: dict[tuple[str, ...], Part],
) -> None:
    ours = pool.run(Case((*base, *CAPACITY, *layout), bug))
    first = compare(ours, references[CAPACITY], EXACT).first
    assert first is not None
    assert (first.what, first.module) == (f"{what} at step 0", name), str(first)


def test_outputs_are_compared_layer_by_layer_too(pool: Pool, base: tuple[str, ...]) -> None:
    told = (*base, *CAPACITY)
    ours = pool.run(Case((*told, *EP2, "parallel.tp=2"), layers=True))
    verdict = compare(ours, whole(Case(told, layers=True)), EXACT)
    assert verdict.first is None, str(verdict.first)


def test_ranks_tell_who_shares_experts(pool: Pool, base: tuple[str, ...]) -> None:
    heard = [p.extra for p in pool.run(Case((*base, *DROPLESS, *EP2)))]
    assert [one.coordinates["ep"] for one in heard] == [0, 1, 0, 1]
    assert {one.order for one in heard} == {("pp", "dp", "tp")}
    assert {tuple(sorted(one.groups.values())) for one in heard} == {("dp", "dp", "ep")}
