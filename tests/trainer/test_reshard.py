"""A run that stopped goes on as if it had not: bit for bit, or on any other layout to 1e-10."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.trainer.resumed import HALF, STEPS, Reshard, a_layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks
PAIRS = 6


@pytest.fixture(scope="module")
def reshard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reshard]:
    one = Reshard(tmp_path_factory.mktemp("reshard"))
    yield one
    one.close()


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        ((), 1),
        (("parallel.tp=2", "parallel.zero=2", "parallel.sp=true"), 4),
        (
            (
                "parallel.pp=2",
                "parallel.schedule=interleaved",
                "parallel.virtual=2",
                "parallel.zero=3",
            ),
            4,
        ),
        (("parallel.cp=2", "parallel.zero=1"), 4),
    ],
    ids=["one process", "tp2 sp zero2", "pp2 interleaved zero3", "cp2 dp2 zero1"],
)
def test_the_same_layout_goes_on_bit_for_bit(
    settings: tuple[str, ...], world: int, reshard: Reshard, tmp_path: Path
) -> None:
    straight = reshard.run(settings, world, STEPS, tmp_path / "straight")
    reshard.run(settings, world, HALF, tmp_path / "stopped")
    resumed = reshard.run(settings, world, STEPS, tmp_path / "stopped")
    for one, other in zip(straight, resumed, strict=True):
        assert other.first == HALF
        assert other.losses == one.losses[HALF:]
        assert other.norms == one.norms[HALF:]
        for key, values in one.ended.items():
            assert np.array_equal(values.values, other.ended[key].values), key


def test_when_one_ranks_disk_is_full_all_go_on(reshard: Reshard, tmp_path: Path) -> None:
    layout = ("parallel.zero=3",)
    first, other = reshard.run(layout, 2, STEPS, tmp_path, full="__1_0.distcp")
    (line,) = first.lines
    assert f"after {HALF} steps was not written: rank 1: No space left on device" in line
    assert line.endswith("the last good one is none")
    assert other.lines == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest", f"step-{STEPS:08d}"]
    assert reshard.run(layout, 2, STEPS, tmp_path)[0].first == STEPS


def test_any_layout_reloads_under_any_other(reshard: Reshard, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    for number in range(PAIRS):
        before, after = (a_layout(choice, 4) for _ in range(2))
        print(f"{before} -> {after}")
        reshard.check(before, after, tmp_path / str(number))
