"""Bugs of the field, planted: each is seen, and the first thing that is named is where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.trainer.pool import Case, Pool, whole
from trainer.parity.bounds import bounds
from trainer.parity.cases import FIXED, SMALL
from trainer.parity.compare import compare
from trainer.parity.proof import ranks_of

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.parity.outcome import Part

pytestmark = pytest.mark.ranks

GPT = "model.file=trainer/examples/gpt.py"
BASE = (*SMALL, *FIXED, "train.dtype=float64", "eval.held=0.1")
DROPOUT = "model.dropout=0.3"
FULL = "memory.checkpoint=full"
DOCUMENTS = "data.documents=true"
TP = ("parallel.tp=2",)
ZERO = ("parallel.dp=2",)
MIXED = "layers.0.attention.out"
DOWN = "layers.3.mlp.down.weight"
VALUE = "layers.3.attention.value.weight"
BUGS = [
    ("summed instead of averaged", ("parallel.dp=2",), "gradient at step 0", "head.weight"),
    ("loss by local tokens", ("parallel.dp=4",), "loss at step 0", None),
    ("clip by the local norm", (*TP, "parallel.pp=2"), "clipped gradient at step 0", "head.weight"),
    ("norm counts replicas", (*TP, "parallel.dp=2"), "gradient norm at step 0", None),
    ("accumulation scaled twice", ("parallel.dp=2",), "gradient at step 0", "head.weight"),
    ("no sum at the entry", TP, "gradient at step 0", "norm.weight"),
    ("no sum of norm weights", (*TP, "parallel.sp=true"), "gradient at step 0", "norm.weight"),
    ("no sum over cp", ("parallel.cp=2",), "gradient at step 0", "head.weight"),
    ("ring gradient stays", ("parallel.cp=2",), "gradient at step 0", VALUE),
    ("positions of the own rank", ("parallel.cp=2",), "output at step 0", MIXED),
    ("documents end at the rank", ("parallel.cp=4", DOCUMENTS), "output at step 0", MIXED),
    ("bias added on every rank", (*TP, GPT), "output at step 0", "blocks.0.attention.out"),
    ("tied gradient of one use", (*TP, f"{GPT}:tied"), "gradient at step 0", "embed.weight"),
    ("last stage scales again", ("parallel.pp=2",), "gradient at step 0", "head.weight"),
    ("stale weights", (*ZERO, "parallel.zero=3"), "output at step 1", "embed"),
    ("dropout equal over tp", (*TP, "parallel.sp=true", DROPOUT), "output at step 0", "embed"),
    ("dropout apart over tp", (*TP, DROPOUT), "output at step 0", "embed"),
    ("dropout equal over dp", ("parallel.dp=2", DROPOUT), "output at step 0", "embed"),
    ("dropout anew in backward", (*TP, DROPOUT, FULL), "gradient at step 0", DOWN),
    ("shares not gathered", (*ZERO, "parallel.zero=1"), "weight after step 0", "embed.weight"),
]  # fmt: skip
RANKS = {
    "last stage scales again": (1,),
    "stale weights": (0, 1),
    "clip by the local norm": (2, 3),
    "loss by local tokens": (0, 1, 2, 3),
}
"""Where the bug is on some ranks only, or must be on all."""


def base(text: Path, layout: tuple[str, ...]) -> tuple[str, ...]:
    """What the layout and one process are both told."""
    shared = [one for one in layout if not one.startswith("parallel.")]
    return (*BASE, f"data.path={text}", *shared)


@pytest.fixture(scope="module")
def references(text: Path) -> dict[tuple[str, ...], Part]:
    """One process of each model, once."""
    models = {base(text, layout) for _, layout, *_ in BUGS}
    return {one: whole(Case(one, layers=True)) for one in models}


@pytest.mark.parametrize(("bug", "layout", "what", "name"), BUGS, ids=[one[0] for one in BUGS])
def test_a_planted_bug_is_seen_and_named(
    bug: str,
    layout: tuple[str, ...],
    what: str,
    name: str | None,
    pool: Pool,
    text: Path,
    references: dict[tuple[str, ...], Part],
) -> None:
    told = base(text, layout)
    settings = (*told, *layout)
    parts = pool.run(Case(settings, bug, world=ranks_of(settings), layers=True))
    first = compare(parts, references[told], bounds("float64", 30)).first
    assert first is not None
    assert (first.what, first.parameter or first.module) == (what, name), str(first)
    assert first.ranks == RANKS.get(bug, first.ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_factor_of_two_is_seen_in_any_arithmetic(dtype: str, pool: Pool, text: Path) -> None:
    told = (*base(text, ()), f"train.dtype={dtype}")
    parts = pool.run(Case((*told, "parallel.dp=2"), "summed instead of averaged", world=2))
    first = compare(parts, whole(Case(told)), bounds(dtype, 30)).first
    assert first is not None
    assert (first.what, first.parameter) == ("gradient at step 0", "head.weight")
