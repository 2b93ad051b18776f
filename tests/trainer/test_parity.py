"""Every layout gives what one process gives, in float64; a wrong factor anywhere is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.trainer.pool import Case, Pool, whole
from trainer.parity.bounds import bounds
from trainer.parity.cases import FIXED, SMALL, STEPS
from trainer.parity.compare import compare

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.parity.outcome import Part

pytestmark = pytest.mark.ranks

BASE = (*SMALL, *FIXED, "train.dtype=float64", "eval.held=0.1")
EXACT = bounds("float64", 30)
ZERO_BUBBLE = "parallel.schedule=zero-bubble"
INTERLEAVED = ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual=2")
CONTEXT = {
    "cp4": ("parallel.cp=4",),
    "cp2 tp2": ("parallel.cp=2", "parallel.tp=2"),
    "cp2 dp2": ("parallel.cp=2",),
    "cp2 pp2": ("parallel.cp=2", "parallel.pp=2"),
}
WITHIN = {("ring", "cp2 tp2"), ("ring", "cp2 dp2")}
"""Pairs that stand inside larger layouts below, as do others that are not named here; alone they
are in `diag parity --matrix`."""
LAYOUTS = {
    "dp4": ("parallel.dp=4",),
    "tp4": ("parallel.tp=4",),
    "pp4": ("parallel.pp=4",),
    "tp2 pp2": ("parallel.tp=2", "parallel.pp=2"),
    "dp2 tp2": ("parallel.dp=2", "parallel.tp=2"),
    "dp2 pp2": ("parallel.dp=2", "parallel.pp=2"),
    "dp2 tp2, tp outermost": ("parallel.tp=2", "mesh.order=tp,dp,pp"),
    "tp2 pp2, pp innermost": ("parallel.tp=2", "parallel.pp=2", "mesh.order=tp,dp,pp"),
    "dp2 pp2, larger microbatches": ("parallel.pp=2", "train.microbatch=2"),
    "dp4, no accumulation": ("parallel.dp=4", "train.microbatch=2"),
    "pp4, fewer microbatches than stages": ("parallel.pp=4", "train.microbatch=4"),
    "zero1": ("parallel.zero=1",),
    "zero2": ("parallel.zero=2",),
    "zero3": ("parallel.zero=3",),
    "zero3 pp2": ("parallel.zero=3", "parallel.pp=2"),
    "tp4 sp": ("parallel.tp=4", "parallel.sp=true"),
    "tp2 sp dp2": ("parallel.tp=2", "parallel.sp=true"),
    "tp2 sp zero1": ("parallel.tp=2", "parallel.sp=true", "parallel.zero=1"),
    "pp4 gpipe": ("parallel.pp=4", "parallel.schedule=gpipe"),
    "pp2 naive dp2": ("parallel.pp=2", "parallel.schedule=naive"),
    "pp2 interleaved tp2": (*INTERLEAVED, "parallel.tp=2", "parallel.sp=true"),
    "pp2 interleaved zero2": (*INTERLEAVED, "parallel.zero=2"),
    "pp2 interleaved zero3, checkpointed": (
        *INTERLEAVED,
        "parallel.zero=3",
        "memory.checkpoint=full",
    ),
    "tp2 sp pp2, checkpointed": (
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.sp=true",
        "memory.checkpoint=every-2",
    ),
    **{
        f"{name} {form}": (*layout, f"parallel.cp_form={form}")
        for form in ("ring", "all-gather")
        for name, layout in CONTEXT.items()
        if (form, name) not in WITHIN
    },
    "cp2 zero3 tp2 sp": ("parallel.cp=2", "parallel.tp=2", "parallel.zero=3", "parallel.sp=true"),
    "cp2 dp2, cp outermost": ("parallel.cp=2", "mesh.order=cp,tp,pp,dp", "parallel.zero=1"),
    "pp4, one bucket": ("parallel.pp=4", "parallel.bucket=100000000"),
    "pp4 zero-bubble, fewer microbatches than stages": (
        "parallel.pp=4",
        ZERO_BUBBLE,
        "train.microbatch=4",
    ),
    "pp2 zero-bubble tp2 sp": ("parallel.pp=2", ZERO_BUBBLE, "parallel.tp=2", "parallel.sp=true"),
    "pp2 zero-bubble cp2": ("parallel.pp=2", ZERO_BUBBLE, "parallel.cp=2"),
    "pp2 zero-bubble zero2": ("parallel.pp=2", ZERO_BUBBLE, "parallel.zero=2"),
    "pp2 zero-bubble zero3, checkpointed by stage": (
        "parallel.pp=2",
        ZERO_BUBBLE,
        "parallel.zero=3",
        "memory.checkpoint=full,selective",
    ),
    "pp2 as told, tp2": ("parallel.pp=2", "parallel.split=1,3", "parallel.tp=2"),
    "pp2 as measured, dp2": ("parallel.pp=2", "parallel.split=measured"),
    "tp2 sp dp2, selective": ("parallel.tp=2", "parallel.sp=true", "memory.checkpoint=selective"),
}


@pytest.fixture(scope="module")
def reference(text: Path) -> Part:
    return whole(Case((*BASE, f"data.path={text}")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout: str, pool: Pool, text: Path, reference: Part) -> None:
    ours = pool.run(Case((*BASE, f"data.path={text}", *LAYOUTS[layout])))
    verdict = compare(ours, reference, EXACT)
    assert verdict.first is None, str(verdict.first)
    assert {tuple(part.tokens) for part in ours} == {tuple(reference.tokens)}


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (("model.layers=5",), ("parallel.tp=2", "parallel.pp=2")),
        (("model.layers=6",), ("parallel.pp=4",)),
        (("model.norm=layernorm",), ("parallel.tp=2", "parallel.pp=2", "parallel.sp=true")),
        (("model.kv_heads=8",), ("parallel.tp=4",)),
        (("optim.clip=0", "train.seed=7"), ("parallel.tp=2",)),
    ],
    ids=["uneven 5 in 2", "uneven 6 in 4", "layernorm", "no gqa", "no clipping"],
)
def test_other_models_equal_one_process(
    settings: tuple[str, ...], layout: tuple[str, ...], pool: Pool, text: Path
) -> None:
    base = (*BASE, f"data.path={text}", *settings)
    verdict = compare(pool.run(Case((*base, *layout))), whole(Case(base)), EXACT)
    assert verdict.first is None, str(verdict.first)


DOCUMENTS = {
    "cp4 ring": ("parallel.cp=4",),
    "cp2 tp2 sp all-gather, checkpointed selectively": (
        "parallel.cp=2",
        "parallel.tp=2",
        "parallel.sp=true",
        "parallel.cp_form=all-gather",
        "memory.checkpoint=selective",
    ),
    "pp2 cp2 ring, checkpointed": ("parallel.pp=2", "parallel.cp=2", "memory.checkpoint=full"),
    "zero3 tp2": ("parallel.zero=3", "parallel.tp=2"),
}


@pytest.fixture(scope="module")
def masked(text: Path) -> Part:
    return whole(Case((*BASE, f"data.path={text}", "data.documents=true")))


@pytest.mark.parametrize("layout", DOCUMENTS)
def test_documents_equal_one_process(
    layout: str, pool: Pool, text: Path, masked: Part, reference: Part
) -> None:
    settings = (*BASE, f"data.path={text}", "data.documents=true", *DOCUMENTS[layout])
    verdict = compare(pool.run(Case(settings)), masked, EXACT)
    assert verdict.first is None, str(verdict.first)
    assert abs(masked.losses[-1] - reference.losses[-1]) > 1e-4, "the mask hides nothing here"


DROPOUT = "model.dropout=0.3"


@pytest.fixture(scope="module")
def dropped(text: Path) -> Part:
    return whole(Case((*BASE, f"data.path={text}", DROPOUT)))


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp=2", "parallel.tp=2"),
        ("parallel.tp=2", "parallel.sp=true", "parallel.cp=2"),
        ("parallel.tp=2", "parallel.sp=true", "parallel.pp=2", "memory.checkpoint=full"),
        ("parallel.zero=3", "parallel.pp=2", ZERO_BUBBLE, "memory.checkpoint=selective"),
        (*INTERLEAVED, "parallel.dp=2", "train.microbatch=2"),
    ],
    ids=" ".join,
)
def test_the_same_elements_fall_under_every_layout(
    layout: tuple[str, ...], pool: Pool, text: Path, dropped: Part, reference: Part
) -> None:
    settings = (*BASE, f"data.path={text}", DROPOUT, *layout)
    verdict = compare(pool.run(Case(settings)), dropped, EXACT)
    assert verdict.first is None, str(verdict.first)
    assert abs(dropped.losses[0] - reference.losses[0]) > 1e-4, "nothing falls"


def test_the_text_makes_ranks_unequal(reference: Part) -> None:
    """Else a loss divided by local tokens would not be seen."""
    assert len(set(reference.tokens)) > 1
    assert max(reference.tokens) < 8 * 24


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_stays_within_its_rounding(dtype: str, pool: Pool, text: Path) -> None:
    base = (*BASE, f"data.path={text}", f"train.dtype={dtype}")
    layout = ("parallel.tp=2", "parallel.sp=true", "parallel.pp=2")
    true = whole(Case(base, layers=True))
    verdict = compare(pool.run(Case((*base, *layout), layers=True)), true, bounds(dtype, 30))
    assert verdict.first is None, str(verdict.first)
    assert verdict.worst.relative > EXACT.computed, "rounding must have left a trace"


def test_what_ranks_tell_names_their_axes(pool: Pool, text: Path) -> None:
    layout = ("parallel.tp=2", "parallel.pp=2", "mesh.order=dp,pp,tp")
    heard = [p.extra for p in pool.run(Case((*BASE, f"data.path={text}", *layout)))]
    assert [one.coordinates for one in heard] == [
        {"dp": 0, "pp": pp, "tp": tp} for pp in (0, 1) for tp in (0, 1)
    ]
    assert {one.order for one in heard} == {("dp", "pp", "tp")}
    for one in heard:
        assert sorted(one.groups.values()) == ["pp", "tp"]
        assert one.steps == list(range(STEPS))
        assert one.nested == []
        for step in range(STEPS):
            for phase in ("forward", "backward"):
                mine = [(m, s) for n, p, m, s in one.phases if n == step and p == phase]
                assert mine == [(m, one.coordinates["pp"]) for m in range(8)]
    same = [
        [name for name, axis in one.groups.items() if axis == "tp"] for one in (heard[0], heard[1])
    ]
    assert same[0] == same[1]
