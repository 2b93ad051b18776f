"""The outputs of every module, many ranks against one process, in the order of forward.

In: each rank's outputs of a step, and those of one process. Out: a difference for each module whose
outputs are parts of the whole: batch over dp and microbatches, positions over cp and sequence
parallelism, the last size over tp. Which part an output is, its shape says: the sizes of the whole
are known, and each axis divides one of them by more than 1.
Outputs that are no such part (a share of a sum, tokens sent elsewhere) are named and left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.parity.verdict import Difference, apart, over_ranks, rms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainer.parity.outcome import Output

    Held = dict[str, list[Output]]


def output_differences(
    number: int, parts: Sequence[Held], true: Held, bound: float
) -> Iterator[Difference]:
    """A difference for each module that can be compared, in the order in which they first ended."""
    for path in true:
        whole = _whole(true[path])
        if whole is None or any(
            _outside(one, whole) for part in parts for one in part.get(path, ())
        ):
            continue
        scale = rms(whole)
        ours = [_apart(part.get(path, []), whole, scale) for part in parts]
        yield over_ranks(f"output at step {number}", path, None, ours, bound)


def unplaced(parts: Sequence[Held], true: Held) -> tuple[str, ...]:
    """The modules that `output_differences` leaves out."""
    left = []
    for path in true:
        whole = _whole(true[path])
        if whole is None or any(
            _outside(one, whole) for part in parts for one in part.get(path, ())
        ):
            left.append(path)
    return tuple(left)


def _whole(outputs: list[Output]) -> np.ndarray | None:
    """One process's microbatches as one (batch, sequence, size); None where they are none."""
    inner = {one.values.shape[1:] for one in outputs}
    if len(inner) != 1 or any(one.values.ndim != 3 for one in outputs):
        return None
    if outputs[0].values.shape[1] != len(outputs[0].positions):
        return None
    ordered = sorted(outputs, key=lambda one: one.first)
    return np.concatenate([one.values for one in ordered])


def _outside(one: Output, whole: np.ndarray) -> bool:
    """Whether this is no part of `whole` by its shape."""
    _, tp = one.share
    if one.values.ndim != 3:
        return True
    _, length, size = one.values.shape
    held = len(one.positions)
    return length not in {held, held / tp} or size not in {whole.shape[2], whole.shape[2] / tp}


def _apart(outputs: list[Output], whole: np.ndarray, scale: float) -> float:
    """How far one rank's outputs are from the parts of the whole that they should be."""
    each = [apart(one.values, _part(one, whole), scale) for one in outputs]
    return max(each, default=0.0)


def _part(one: Output, whole: np.ndarray) -> np.ndarray:
    index, _tp = one.share
    samples, length, size = one.values.shape
    rows = one.positions
    if length < len(rows):
        rows = rows[index * length : (index + 1) * length]
    last = index * size if size < whole.shape[2] else 0
    found: np.ndarray = whole[one.first : one.first + samples, rows, last : last + size]
    return found
