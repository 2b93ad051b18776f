"""SIGKILL at any moment of a save leaves the last good checkpoint, and no run goes astray by it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.trainer.killed import Victims

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks
KILLS = 6


def test_whenever_it_is_killed_the_last_good_one_is_there(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    victims = Victims(tmp_path, seed, ranks=1)
    reached = [victims.kill_one(number) for number in range(KILLS)]
    assert reached == sorted(reached)
    assert reached[-1] > 0
