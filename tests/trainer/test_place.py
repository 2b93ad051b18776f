"""What a rank holds is told as blocks of the whole: each element once, in the right order."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.place import Place


@st.composite
def places(draw: st.DrawFn) -> Place:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    place = Place.of_all(shape)
    for _ in range(draw(st.integers(0, 2))):
        dim = draw(st.integers(0, len(shape) - 1))
        shards = draw(st.sampled_from([n for n in range(1, 6) if place.sizes[dim] % n == 0]))
        place = place.cut(dim, draw(st.integers(0, shards - 1)), shards)
    start = draw(st.integers(0, math.prod(place.sizes)))
    return place.stretch(start, draw(st.integers(0, math.prod(place.sizes) - start)))


@given(places())
def test_the_blocks_of_a_stretch_are_the_stretch(place: Place) -> None:
    whole = np.arange(math.prod(place.shape)).reshape(place.shape)
    blocks = place.blocks()
    assert len(blocks) <= 2 * len(place.shape) - 1
    assert sum(block.count for block in blocks) == place.count
    flat = place.pick(whole)
    for block in blocks:
        box = tuple(slice(a, a + n) for a, n in zip(block.offset, block.sizes, strict=True))
        assert np.array_equal(whole[box].reshape(-1), flat[block.start : block.start + block.count])


def test_a_scalar_is_one_block() -> None:
    (block,) = Place.of_all(()).blocks()
    assert (block.offset, block.sizes, block.start, block.count) == ((), (), 0, 1)


def test_the_shards_of_a_cut_make_the_whole() -> None:
    whole = np.arange(24).reshape(4, 6)
    parts = [Place.of_all((4, 6)).cut(1, index, 3).pick(whole) for index in range(3)]
    assert np.array_equal(np.concatenate([p.reshape(4, 2) for p in parts], axis=1), whole)
