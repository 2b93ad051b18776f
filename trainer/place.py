"""Where what a rank holds lies in the whole parameter: what parity and checkpoints both speak of.

In: the shape of the whole, the block of it that is this rank's shard (tp and its like cut blocks),
and the stretch of the flattened shard that is this rank's piece (ZeRO cuts stretches).
Out: `Place`, which picks the same stretch out of any whole, or says of which blocks it is made.

    whole (4, 6), columns 3-5 are the shard, elements 2-8 of it the piece:    . . . . . #
                                                                              . . . # # #
    as blocks: (0, 5) 1x1, (1, 3) 1x3, (2, 3) 1x3                             . . . # # #
                                                                              . . . . . .
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of the whole whose elements follow each other in the piece."""

    offset: tuple[int, ...]
    """In the whole."""
    sizes: tuple[int, ...]
    start: int
    """Where its elements begin in the flat piece."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    def split(self, most: int) -> Iterator[Block]:
        """The same elements in order, in blocks of at most `most` (1 or more)."""
        if self.count <= most:
            yield self
            return
        dim = next(i for i, size in enumerate(self.sizes) if size > 1)
        row = self.count // self.sizes[dim]
        step = max(1, most // row)
        for at in range(0, self.sizes[dim], step):
            rows = min(step, self.sizes[dim] - at)
            yield from Block(
                (*self.offset[:dim], self.offset[dim] + at, *self.offset[dim + 1 :]),
                (*self.sizes[:dim], rows, *self.sizes[dim + 1 :]),
                self.start + at * row,
            ).split(most)


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of a flattened block (the shard) of a whole parameter."""

    shape: tuple[int, ...]
    """Of the whole."""
    offset: tuple[int, ...]
    """Where the shard begins in the whole."""
    sizes: tuple[int, ...]
    """Of the shard."""
    start: int
    """Where the stretch begins in the flattened shard."""
    count: int
    """Elements of the stretch."""

    @classmethod
    def of_all(cls, shape: tuple[int, ...]) -> Place:
        """The place of a whole parameter."""
        return cls(shape, (0,) * len(shape), shape, 0, math.prod(shape))

    def cut(self, dim: int, index: int, shards: int) -> Place:
        """The place of one of `shards` even parts of this shard along `dim`."""
        size = self.sizes[dim] // shards
        offset = (*self.offset[:dim], self.offset[dim] + index * size, *self.offset[dim + 1 :])
        sizes = (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        return Place(self.shape, offset, sizes, 0, math.prod(sizes))

    def stretch(self, start: int, count: int) -> Place:
        """The place of `count` elements of the flattened shard from `start`."""
        return replace(self, start=start, count=count)

    def pick(self, whole: Any) -> Any:
        """The same stretch of a whole array or tensor of this shape, flat."""
        box = tuple(slice(at, at + n) for at, n in zip(self.offset, self.sizes, strict=True))
        return whole[box].reshape(-1)[self.start : self.start + self.count]

    def blocks(self) -> list[Block]:
        """The blocks that make up the stretch, in its order; at most 2 x dims - 1."""
        found, at = [], 0
        for inner, sizes in _rectangles(self.sizes, self.start, self.start + self.count):
            offset = tuple(a + b for a, b in zip(self.offset, inner, strict=True))
            found.append(Block(offset, sizes, at))
            at += found[-1].count
        return found


def _rectangles(
    sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, sizes) of elements [start, stop) of a row-major array: a head, full rows, a tail."""
    if start >= stop:
        return
    if len(sizes) <= 1:
        yield ((start,), (stop - start,)) if sizes else ((), ())
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        for offset, inner in _rectangles(sizes[1:], start - last * row, stop - last * row):
            yield (last, *offset), (1, *inner)
        return
    for offset, inner in _rectangles(sizes[1:], start - (first - 1) * row, row):
        yield (first - 1, *offset), (1, *inner)
    if first < last:
        yield (first, *(0,) * len(sizes[1:])), (last - first, *sizes[1:])
    for offset, inner in _rectangles(sizes[1:], 0, stop - last * row):
        yield (last, *offset), (1, *inner)
