"""Is this layout equal to one process? The question put to real ranks, in float64.

In: settings as the trainer takes them. Out: `Row`: how far the ranks were from one process, and the
first thing that differed. One process runs the same settings without any parallelism.
No torch here: it is the ranks that import it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.layout import resolve
from trainer.parity.outcome import Difference, Part, compare
from trainer.parity.pool import Pool, RanksFailedError
from trainer.parity.work import STEPS, run
from trainer.settings import load, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainer.config import Config

BOUND = 1e-10
"""Largest relative difference: float64 leaves about 1e-15, a wrong factor at least 1e-3."""
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
    "eval.every=3",
    "eval.batches=1",
)
"""A model of which every part can be cut, small enough for a laptop."""
_EXACT = (
    "train.dtype=float64",
    "train.device=cpu",
    f"train.steps={STEPS}",
    "faults.kind=none",
)
_ALONE = (
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


@dataclass(frozen=True)
class Row:
    """One layout's answer."""

    layout: dict[str, Any]
    worst: float
    """Largest relative difference anywhere; infinite where a rank failed."""
    first: Difference | None
    """None: equal."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """As the schema diag.parity/1 has it."""
        first = self.first
        return {
            "layout": self.layout,
            "equal": first is None,
            "worst_relative": self.worst if self.worst < float("inf") else None,
            "first_difference": first
            and {
                "what": first.what,
                "module": first.module,
                "parameter": first.parameter,
                "ranks": list(first.ranks),
            },
            "seconds": round(self.seconds, 2),
        }


def ranks_of(settings: Sequence[str]) -> int:
    """How many ranks these settings ask for; dp=0 counts as 1."""
    asked = read(list(settings)).parallel
    return max(1, asked.dp) * asked.tp * asked.pp * asked.cp


def prove(cases: Sequence[tuple[tuple[str, ...], int]]) -> Iterator[Row]:
    """A row for each (settings, ranks), as it is found. Raises ConfigError before anything runs."""
    full = [((*settings, *_EXACT), ranks) for settings, ranks in cases]
    configs = [load(list(settings), ranks) for settings, ranks in full]
    for settings, _ in full:
        load([*settings, *_ALONE], 1)
    known: dict[tuple[str, ...], Part] = {}
    pool = Pool(run)
    try:
        for (settings, ranks), config in zip(full, configs, strict=True):
            began = time.monotonic()
            base = _base(settings)
            if base not in known:
                known[base] = pool.run((*base, *_ALONE), 1)[0]
            yield _row(pool, settings, ranks, config, known[base], began)
    finally:
        pool.close()


def _base(settings: tuple[str, ...]) -> tuple[str, ...]:
    """What one process is told too."""
    return tuple(one for one in settings if not one.startswith(("parallel.", "memory.", "mesh.")))


def _row(
    pool: Pool, settings: tuple[str, ...], ranks: int, config: Config, true: Part, began: float
) -> Row:
    layout = _describe(config, ranks)
    try:
        verdict = compare(pool.run(settings, ranks), true, BOUND)
    except RanksFailedError as error:
        why = str(error).strip().splitlines()[-1]
        first = Difference(f"a rank failed: {why}", None, (), float("inf"))
        return Row(layout, float("inf"), first, time.monotonic() - began)
    return Row(layout, verdict.worst.relative, verdict.first, time.monotonic() - began)


def _describe(config: Config, ranks: int) -> dict[str, Any]:
    """The layout, without what is off."""
    layout, asked = resolve(config, ranks), config.parallel
    told: dict[str, Any] = {
        axis: layout.size(axis) for axis in ("dp", "tp", "pp", "cp", "ep") if layout.size(axis) > 1
    }
    told |= {"experts": config.model.experts} if config.model.experts else {}
    told |= {"capacity": config.model.capacity} if config.model.capacity else {}
    told |= {"zero": asked.zero} if asked.zero else {}
    told |= {"replicate": asked.replicate} if asked.replicate > 1 else {}
    told |= {"prefetch": asked.prefetch} if asked.zero == 3 else {}
    told |= {"sp": True} if asked.sp else {}
    told |= {"cp_form": asked.cp_form} if layout.cp > 1 else {}
    told |= {"schedule": asked.schedule} if layout.pp > 1 else {}
    told |= {"virtual": asked.virtual} if asked.virtual > 1 else {}
    told |= {"split": ",".join(asked.split)} if asked.split != ("even",) else {}
    told |= {"dropout": config.model.dropout} if config.model.dropout else {}
    kind = ",".join(config.memory.checkpoint)
    told |= {"checkpoint": kind} if kind != "none" else {}
    offload = config.memory.offload
    return told | ({"offload": offload} if offload != "none" else {})
