"""Every layout gives what one process gives, in float64; a wrong factor anywhere is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.trainer.pool import Case, Pool, whole
from trainer.parity.outcome import Part, compare
from trainer.parity.train import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks

RELATIVE = 1e-10
SMALL = (
    "train.dtype=float64",
    "train.device=cpu",
    f"train.steps={STEPS}",
    "train.global_batch=8",
    "train.microbatch=1",
    "train.sequence=24",
    "model.layers=4",
    "model.width=32",
    "model.heads=8",
    "model.kv_heads=4",
    "model.mlp=48",
    "optim.warmup=1",
    "optim.clip=0.5",
    "parallel.bucket=20000",
    "eval.every=2",
    "eval.batches=1",
    "eval.held=0.1",
)
INTERLEAVED = ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual=2")
CONTEXT = {
    "cp4": ("parallel.cp=4",),
    "cp2 tp2": ("parallel.cp=2", "parallel.tp=2"),
    "cp2 dp2": ("parallel.cp=2",),
    "cp2 pp2": ("parallel.cp=2", "parallel.pp=2"),
}
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
    "zero1 tp2": ("parallel.zero=1", "parallel.tp=2"),
    "zero2 pp2": ("parallel.zero=2", "parallel.pp=2"),
    "zero3 tp2": ("parallel.zero=3", "parallel.tp=2"),
    "zero3 pp2": ("parallel.zero=3", "parallel.pp=2"),
    "tp4 sp": ("parallel.tp=4", "parallel.sp=true"),
    "tp2 sp dp2": ("parallel.tp=2", "parallel.sp=true"),
    "tp2 sp pp2": ("parallel.tp=2", "parallel.pp=2", "parallel.sp=true"),
    "tp2 sp zero1": ("parallel.tp=2", "parallel.sp=true", "parallel.zero=1"),
    "tp2 sp zero3": ("parallel.tp=2", "parallel.sp=true", "parallel.zero=3"),
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
    },
    "cp2 zero3 tp2 sp": ("parallel.cp=2", "parallel.tp=2", "parallel.zero=3", "parallel.sp=true"),
    "cp2 dp2, cp outermost": ("parallel.cp=2", "mesh.order=cp,tp,pp,dp", "parallel.zero=1"),
    "pp4, one bucket": ("parallel.pp=4", "parallel.bucket=100000000"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many short files: samples then differ in their number of valid tokens."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(5)
    for i in range(200):
        words = random.integers(97, 123, size=int(random.integers(3, 40)), dtype=np.uint8)
        (folder / f"{i:03}.txt").write_bytes(words.tobytes())
    return folder


@pytest.fixture(scope="module")
def reference(text: Path) -> Part:
    return whole(Case((*SMALL, f"data.path={text}")))


def apart(ours: list[float], true: list[float]) -> float:
    """Largest difference, relative to the largest true value."""
    return float(np.abs(np.array(ours) - true).max() / max(np.abs(true).max(), 1e-300))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout: str, pool: Pool, text: Path, reference: Part) -> None:
    ours = pool.run(Case((*SMALL, f"data.path={text}", *LAYOUTS[layout])))
    verdict = compare(ours, reference, RELATIVE)
    assert verdict.first is None, str(verdict.first)
    assert verdict.worst.relative < RELATIVE
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
    base = (*SMALL, f"data.path={text}", *settings)
    verdict = compare(pool.run(Case((*base, *layout))), whole(Case(base)), RELATIVE)
    assert verdict.first is None, str(verdict.first)


DOCUMENTS = {
    "cp4 ring": ("parallel.cp=4",),
    "cp2 tp2 sp all-gather": (
        "parallel.cp=2",
        "parallel.tp=2",
        "parallel.sp=true",
        "parallel.cp_form=all-gather",
    ),
    "pp2 cp2 ring, checkpointed": ("parallel.pp=2", "parallel.cp=2", "memory.checkpoint=full"),
    "zero3 tp2": ("parallel.zero=3", "parallel.tp=2"),
}


@pytest.fixture(scope="module")
def masked(text: Path) -> Part:
    return whole(Case((*SMALL, f"data.path={text}", "data.documents=true")))


@pytest.mark.parametrize("layout", DOCUMENTS)
def test_documents_equal_one_process(
    layout: str, pool: Pool, text: Path, masked: Part, reference: Part
) -> None:
    settings = (*SMALL, f"data.path={text}", "data.documents=true", *DOCUMENTS[layout])
    verdict = compare(pool.run(Case(settings)), masked, RELATIVE)
    assert verdict.first is None, str(verdict.first)
    assert apart(masked.losses, reference.losses) > 1e-4, "the mask hides nothing in this text"


def test_a_mask_that_ends_at_the_ranks_own_keys_is_seen(
    pool: Pool, text: Path, masked: Part
) -> None:
    settings = (*SMALL, f"data.path={text}", "data.documents=true", "parallel.cp=4")
    verdict = compare(pool.run(Case(settings, "documents end at the rank")), masked, RELATIVE)
    assert verdict.first is not None
    assert verdict.worst.relative > 1e-2, f"only {verdict.worst}"


def test_the_text_makes_ranks_unequal(reference: Part) -> None:
    """Else a loss divided by local tokens would not be seen."""
    assert len(set(reference.tokens)) > 1
    assert max(reference.tokens) < 8 * 24


@pytest.mark.parametrize(
    ("bug", "layout", "least"),
    [
        ("summed instead of averaged", ("parallel.dp=4",), 0.5),
        ("loss by local tokens", ("parallel.dp=4",), 1e-4),
        ("clip by the local norm", ("parallel.tp=2", "parallel.pp=2"), 1e-2),
        ("norm counts replicas", ("parallel.dp=2", "parallel.tp=2"), 1e-2),
        ("accumulation scaled twice", ("parallel.dp=2",), 0.1),
        ("no sum at the entry", ("parallel.tp=4",), 1e-2),
        ("ring gradient stays", ("parallel.cp=2",), 1e-2),
        ("no sum of norm weights", ("parallel.tp=2", "parallel.sp=true"), 1e-2),
    ],
)
def test_planted_bug_is_seen(
    bug: str, layout: tuple[str, ...], least: float, pool: Pool, text: Path, reference: Part
) -> None:
    settings = (*SMALL, f"data.path={text}", "parallel.tp=1", *layout)
    if bug == "accumulation scaled twice":
        settings = (*settings, "parallel.pp=2")
    verdict = compare(pool.run(Case(settings, bug)), reference, RELATIVE)
    assert verdict.first is not None
    assert verdict.worst.relative > least, f"only {verdict.worst}"


@pytest.mark.parametrize(
    ("dtype", "relative"), [("float32", 1e-5), ("bfloat16", 2e-2)], ids=["float32", "bfloat16"]
)
def test_lower_precision_stays_near(
    dtype: str, relative: float, pool: Pool, text: Path, reference: Part
) -> None:
    layout = ("parallel.tp=2", "parallel.pp=2", f"train.dtype={dtype}")
    ours = pool.run(Case((*SMALL, f"data.path={text}", *layout)))
    assert apart(ours[0].losses, reference.losses) < relative
    assert apart(ours[0].norms, reference.norms) < 10 * relative


def test_what_ranks_tell_names_their_axes(pool: Pool, text: Path) -> None:
    layout = ("parallel.tp=2", "parallel.pp=2", "mesh.order=dp,pp,tp")
    heard = [p.extra for p in pool.run(Case((*SMALL, f"data.path={text}", *layout)))]
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
