"""Whether the settings of checkpoints make sense together; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config


def problems(config: Config) -> list[str]:
    """Each with the flag to change."""
    if config.checkpoint.every and not config.checkpoint.folder:
        why = f"checkpoint.every={config.checkpoint.every} has no folder to write to"
        return [f"{why} (checkpoint.folder=FOLDER, or checkpoint.every=0)"]
    return []
