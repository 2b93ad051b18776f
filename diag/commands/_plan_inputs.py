"""What `diag plan` is asked: a model, a cluster, a batch, from names and files.

In: the command's options. Out: a Job, and the axes that are fixed; a UsageError of one line for
what cannot be read or is missing. Files are strangers': sizes are bounded, nothing is run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collectors.topology.graph import Topology
    from trainer.planner.candidate import Job, Numbers
    from trainer.planner.cluster import Cluster
    from trainer.planner.shape import Shape

_BYTES = 4 << 20
_GPUS = 1 << 20
FIXED = {
    "dp": int, "zero": int, "tp": int, "sp": bool, "pp": int, "virtual": int, "schedule": str,
    "cp": int, "cp_form": str, "ep": int, "microbatch": int, "checkpointing": str,
}  # fmt: skip
"""What --fix may hold."""


@dataclass(frozen=True)
class Asked:
    """The options."""

    model: str
    gpus: int | None
    gpu: str | None
    per_node: int | None
    topology: str | None
    sequence: int | None
    batch: int | None
    dtype: str | None
    fix: tuple[str, ...]


def job_of(asked: Asked) -> tuple[Job, dict[str, Any]]:
    """(what is to be trained on what, the axes that are fixed)."""
    from trainer.planner.candidate import DTYPES, NUMBERS, Job

    shape, told = _model(asked.model)
    sequence, batch = asked.sequence or told.get("sequence"), asked.batch or told.get("batch")
    gpus = asked.gpus
    missing = [
        flag
        for flag, value in (("--gpus N", gpus), ("--seq N", sequence), ("--global-batch N", batch))
        if not value
    ]
    if not asked.gpu and not asked.topology:
        missing.append("--gpu KIND or --topology FILE")
    if missing or not gpus or not sequence or not batch:
        raise click.UsageError(f"{', '.join(missing)} is needed")
    numbers: Numbers = NUMBERS[DTYPES[asked.dtype]] if asked.dtype else told["numbers"]
    fixed = told.get("fixed", {}) | _fixed(asked.fix)
    cluster = _cluster(asked, gpus)
    return Job(shape, cluster, sequence, batch, numbers), fixed


def _model(text: str) -> tuple[Shape, dict[str, Any]]:
    from trainer.planner.candidate import NUMBERS
    from trainer.planner.presets import PRESETS, named
    from trainer.planner.sources import ShapeError, from_hf

    preset = named(text)
    path = Path(text)
    if preset is not None and not path.is_file():
        return preset, {"numbers": NUMBERS["bf16"]}
    if not path.is_file():
        known = ", ".join(PRESETS)
        raise click.UsageError(f"--model {text}: neither a file nor one of {known}")
    if path.suffix == ".toml":
        return _of_trainer(text)
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES + 1)
        if len(data) > _BYTES:
            raise ValueError(f"larger than {_BYTES >> 20} MiB")
        raw = json.loads(data)
    except (OSError, ValueError, RecursionError) as wrong:
        raise click.UsageError(f"--model {text}: not a config.json or .toml: {wrong}") from wrong
    if not isinstance(raw, dict):
        raise click.UsageError(f"--model {text}: a config.json holds an object")
    try:
        inner = raw.get("text_config")
        return from_hf(inner if isinstance(inner, dict) else raw, path.stem), {
            "numbers": NUMBERS["bf16"]
        }
    except ShapeError as wrong:
        raise click.UsageError("; ".join(str(wrong).splitlines())) from wrong


def _of_trainer(text: str) -> tuple[Shape, dict[str, Any]]:
    """A config of the trainer: its model, batch and arithmetic; the layout is what we look for."""
    from trainer.config import ConfigError
    from trainer.planner.sources import ShapeError, from_trainer
    from trainer.settings import read

    try:
        config = read(["--config", text])
        shape, numbers, _ = from_trainer(config, Path(text).stem)
    except ConfigError as wrong:
        raise click.UsageError("; ".join(wrong.problems)) from wrong
    except ShapeError as wrong:
        raise click.UsageError("; ".join(str(wrong).splitlines())) from wrong
    train = config.train
    return shape, {"numbers": numbers, "sequence": train.sequence, "batch": train.global_batch}


def _fixed(pairs: tuple[str, ...]) -> dict[str, Any]:
    from trainer.planner.candidate import CHECKPOINTING, SCHEDULES

    out: dict[str, Any] = {}
    for word in " ".join(pairs).replace(",", " ").split():
        key, _, text = word.partition("=")
        kind = FIXED.get(key)
        if kind is None or not text:
            raise click.UsageError(f"--fix {word}: axis=value is needed, of {', '.join(FIXED)}")
        if kind is int:
            if not text.isdecimal() or not int(text) <= _GPUS or (key != "zero" and text == "0"):
                raise click.UsageError(f"--fix {word}: a whole number is needed")
            out[key] = int(text)
        elif kind is bool:
            out[key] = text.lower() in {"1", "true", "yes"}
        else:
            out[key] = text
    choices = {
        "schedule": SCHEDULES,
        "checkpointing": CHECKPOINTING,
        "cp_form": ("ring", "all-gather"),
        "zero": (0, 1, 2, 3),
    }
    for key, among in choices.items():
        if key in out and out[key] not in among:
            raise click.UsageError(f"--fix {key}={out[key]}: one of {', '.join(map(str, among))}")
    return out


def _cluster(asked: Asked, gpus: int) -> Cluster:
    from trainer.planner.cluster import GPUS, Cluster, gpu_named

    if not 1 <= gpus <= _GPUS:
        raise click.UsageError(f"--gpus {gpus}: from 1 to {_GPUS}")
    topology = _topology(asked.topology) if asked.topology else None
    words = asked.gpu or (topology.gpus[0].model if topology and topology.gpus else None)
    if not words:
        raise click.UsageError(f"{asked.topology}: it names no GPU model; add --gpu KIND")
    kind = gpu_named(words)
    if kind is None:
        raise click.UsageError(f"--gpu {words}: not one of {', '.join(GPUS)}")
    if topology is None:
        return Cluster(kind, gpus, asked.per_node or 8)
    per_node = asked.per_node or max(1, len(topology.gpus))
    names = {one.name for one in topology.gpus}
    joined = [one for one in topology.links if {one.a, one.b} <= names]
    known = [one.bandwidth for one in joined if one.kind == "nvlink" and one.bandwidth]
    whole = len(known) == len(names) * (len(names) - 1) // 2
    rates = [one.rate for one in topology.nics if one.rate]
    return Cluster(
        kind,
        gpus,
        per_node,
        nvlink=min(known) if known and whole else 0.0,
        nic=sum(rates) / per_node if rates else 0.0,
        source=str(asked.topology),
    )


def _topology(path: str) -> Topology:
    from collectors.readers import read_paths

    collected = read_paths([path])
    if not collected.topologies:
        told = [problem for source in collected.sources for problem in source.problems]
        why = "; ".join(told) or "no topology in it; `nvidia-smi topo -m` prints one"
        raise click.UsageError(f"{path}: {why}")
    return min(collected.topologies, key=lambda one: len(one.gpus))
