"""Ranks and text that the parity tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.trainer.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks for all modules: four imports of torch cost as much as ten layouts."""
    from tests.trainer.pool import Pool

    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many short files: samples then differ in their number of valid tokens."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(5)
    for i in range(200):
        words = random.integers(97, 123, size=int(random.integers(3, 40)), dtype=np.uint8)
        (folder / f"{i:03}.txt").write_bytes(words.tobytes())
    return folder
