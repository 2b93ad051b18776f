"""What a parity run is told beside the layout: the small model, and what must not vary.

Shared by the command, the matrix and the tests, so that all three prove the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 3
"""Optimizer steps of a parity run: moments and weights of earlier steps then matter."""
SMALL = (
    "train.global_batch=8",
    "train.microbatch=1",
    "train.sequence=24",
    "model.layers=4",
    "model.width=32",
    "model.heads=8",
    "model.kv_heads=4",
    "model.mlp=48",
    "optim.warmup=1",
    "optim.clip=0.5",
    "parallel.bucket=20000",
    "eval.every=2",
    "eval.batches=1",
)
"""A model of which every part can be cut, small enough for a laptop."""
FIXED = ("train.device=cpu", f"train.steps={STEPS}", "faults.kind=none")
"""Where and how long every run of a comparison goes."""
ALONE = (
    "parallel.dp=1",
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.cp=1",
    "parallel.ep=1",
    "parallel.zero=0",
    "parallel.replicate=1",
    "parallel.sp=false",
    "parallel.schedule=1f1b",
    "parallel.virtual=1",
    "parallel.split=even",
    "memory.checkpoint=none",
    "memory.limit=0",
    "memory.offload=none",
)
"""Every axis off: what one process is told."""


@dataclass(frozen=True)
class Case:
    """One run on its ranks."""

    settings: tuple[str, ...]
    layers: bool = False
    """Whether the outputs of every module are brought home, of the first step."""
