"""What a rank of a parity run does; importable without torch, which the rank imports itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.parity.cases import Case
    from trainer.parity.outcome import Part


def run(case: Case, world: int) -> Part:
    """The trainer with these settings on this rank of `world`."""
    from trainer.parity.train import train

    return train(case, world)
