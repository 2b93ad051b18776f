"""Columns of tables as numpy arrays, with text as codes.

Pure helpers that metrics and rules share, so that a million rows cost tenths of a second.
Null is -1 in codes and in integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from collectors.collected import Collected

Ints = "npt.NDArray[np.int64]"


def codes(collected: Collected, table: str, column: str) -> tuple[npt.NDArray[np.int64], list[str]]:
    """(code of each row, text of each code); null rows have code -1."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = collected.tables[table].column(column).combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], pa.string())
    encoded = whole.dictionary_encode()
    numbers = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    texts: list[str] = encoded.dictionary.to_pylist()
    return numbers.astype(np.int64), texts


def flags(collected: Collected, table: str, column: str) -> npt.NDArray[np.bool_]:
    """A truth column; null is False."""
    import pyarrow.compute as pc

    filled = pc.fill_null(collected.tables[table].column(column), False)
    values: npt.NDArray[np.bool_] = filled.to_numpy().astype(np.bool_, copy=False)
    return values


def starts(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Index of the first row of each run of equal values in sorted `keys`."""
    if keys.size == 0:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))).astype(np.int64)
