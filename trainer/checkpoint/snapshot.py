"""trainer.json beside the tensors: where the run stood, and with which settings.

In: a Trainer, or the folder of a checkpoint. Out: `Snapshot`, and what speaks against going on from
it: another model, or a data position that would mean other samples. Other changes are told.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.loop import Trainer

FILES = (".metadata", "trainer.json")
"""A whole checkpoint has both, and the files that .metadata names."""
_FILE = FILES[1]
_SCHEMA = "trainer.checkpoint/1"
_MOST_BYTES = 1 << 20
_SCALE = ("value", "good", "skipped")
_FIXED = ("train.global_batch", "train.sequence", "train.seed")
"""Settings without which a step's number means other samples."""
_FREE = ("parallel", "memory", "mesh", "checkpoint", "log", "faults")
"""Sections that may differ without a word: how the run is laid out and watched."""
_FREE_KEYS = ("train.microbatch", "train.device", "model.file")
"""As sections; the model itself is compared by its tensors."""


@dataclass(frozen=True)
class Snapshot:
    """What trainer.json holds."""

    step: int
    """Steps done, which is the number of the next one."""
    samples: int
    """Of an epoch, to notice that another text, or another part of it, is trained on."""
    scale: dict[str, float]
    """The loss scale, as it tells its own state."""
    config: dict[str, dict[str, Any]]
    """All settings by section."""


def take(trainer: Trainer, step: int) -> str:
    """The text of trainer.json after `step` steps."""
    scale = trainer.scale.state_dict()
    now = Snapshot(step, trainer.loader.trained, scale, asdict(trainer.config))
    return json.dumps({"schema": _SCHEMA, **asdict(now)}, indent=1) + "\n"


def whole(folder: Path) -> bool:
    """Whether a folder has what every whole checkpoint has."""
    return all((folder / one).is_file() for one in FILES)


def read(folder: Path) -> Snapshot:
    """Raises OSError, and ValueError for what no trainer wrote."""
    with (folder / _FILE).open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{_FILE} has more than {_MOST_BYTES} bytes")
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_FILE} is not JSON: {error}") from error
    if not isinstance(held, dict) or held.get("schema") != _SCHEMA:
        raise ValueError(f"{_FILE} does not say schema {_SCHEMA}")
    try:
        return _checked(held)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{_FILE} does not hold what a run needs: {error}") from error


def compare(kept: Snapshot, trainer: Trainer) -> tuple[list[str], list[str]]:
    """(why this trainer cannot go on from it, what else has changed), each line with its flag."""
    refused, told = [], []
    for section, fields in asdict(trainer.config).items():
        for field, value in fields.items():
            key, ours = f"{section}.{field}", _plain(value)
            theirs = kept.config.get(section, {}).get(field, ours)
            if theirs == ours or section in _FREE or key in _FREE_KEYS:
                continue
            change = f"{key}={theirs} there, {ours} here"
            if section == "model":
                refused.append(f"it is another model: {change}")
            elif key in _FIXED:
                refused.append(f"its {kept.step} steps were over other samples: {change}")
            else:
                told.append(f"changed since: {change}")
    samples = trainer.loader.trained
    if kept.samples != samples:
        told.append(
            f"changed since: {kept.samples:,} samples an epoch there, {samples:,} here, reordered"
        )
    return refused, told


def _checked(held: dict[str, Any]) -> Snapshot:
    """Raises KeyError, TypeError and ValueError."""
    step, samples, scale, config = (held[key] for key in ("step", "samples", "scale", "config"))
    if not (type(step) is type(samples) is int and step >= 0):
        raise ValueError(f"step {step!r}, samples {samples!r}")
    sections = {str(name): dict(fields) for name, fields in dict(config).items()}
    return Snapshot(step, samples, {name: float(dict(scale)[name]) for name in _SCALE}, sections)


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
