"""Is this layout equal to one process? The question put to real ranks.

In: settings as the trainer takes them. Out: `Row`: how far the ranks were from one process, and the
first thing that differed. One process runs the same settings, in the same arithmetic, without any
parallelism.
No torch here: it is the ranks that import it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config import ConfigError
from trainer.layout import resolve
from trainer.parity.bounds import bounds
from trainer.parity.cases import ALONE, FIXED, Case
from trainer.parity.compare import compare
from trainer.parity.pool import Pool, RanksFailedError
from trainer.parity.verdict import Difference
from trainer.parity.work import run
from trainer.settings import load, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainer.config import Config
    from trainer.parity.outcome import Part


@dataclass(frozen=True)
class Row:
    """One layout's answer."""

    layout: dict[str, Any]
    worst: float
    """Largest relative difference anywhere; infinite where a rank failed."""
    first: Difference | None
    """None: equal."""
    seconds: float
    refused: tuple[str, ...] = ()
    """Why this cannot be laid out so; then nothing ran, and it is not unequal."""
    modules: int | None = None
    """Whose outputs were compared; None where nobody asked."""
    left_out: tuple[str, ...] = ()
    """What could not be compared."""

    def as_json(self) -> dict[str, Any]:
        """As the schema diag.parity/1 has it."""
        first = self.first
        told: dict[str, Any] = {
            "layout": self.layout,
            "equal": None if self.refused else first is None,
            "worst_relative": self.worst if math.isfinite(self.worst) else None,
            "first_difference": first
            and {
                "what": first.what,
                "module": first.module,
                "parameter": first.parameter,
                "ranks": list(first.ranks),
            },
            "seconds": round(self.seconds, 2),
        }
        told |= {"modules_compared": self.modules} if self.modules is not None else {}
        told |= {"refused": list(self.refused)} if self.refused else {}
        return told | {"not_compared": list(self.left_out)}


def ranks_of(settings: Sequence[str]) -> int:
    """How many ranks these settings ask for; dp=0 counts as 1."""
    asked = read(list(settings)).parallel
    return max(1, asked.dp) * asked.tp * asked.pp * asked.cp


def prove(
    cases: Sequence[tuple[tuple[str, ...], int]], dtype: str = "float64", *, layers: bool = False
) -> Iterator[Row]:
    """A row for each (settings, ranks), as it is found; `layers`: outputs of every module too.

    Raises ConfigError for settings that cannot be read.
    """
    fixed = (*FIXED, f"train.dtype={dtype}")
    known: dict[tuple[str, ...], Part | ConfigError] = {}
    pool = Pool(run)
    try:
        for settings, ranks in cases:
            began = time.monotonic()
            case = Case((*settings, *fixed), layers)
            asked = read(list(case.settings))
            try:
                config = load(list(case.settings), ranks)
            except ConfigError as error:
                yield _refused(asked, ranks, error.problems, began)
                continue
            base = _base(case.settings)
            if base not in known:
                known[base] = _alone(pool, Case((*base, *ALONE), layers))
            true = known[base]
            if isinstance(true, ConfigError):
                yield _refused(config, ranks, true.problems, began)
            else:
                yield _row(pool, case, ranks, config, true, began)
    finally:
        pool.close()


def _base(settings: tuple[str, ...]) -> tuple[str, ...]:
    """What one process is told too."""
    return tuple(one for one in settings if not one.startswith(("parallel.", "memory.", "mesh.")))


def _alone(pool: Pool, case: Case) -> Part | ConfigError:
    """One process; what it cannot run is no question of layout, and is refused under each."""
    try:
        part: Part = pool.run(case, 1)[0]
    except RanksFailedError as error:
        why = error.first
        own = why.kind in {ConfigError.__name__, "ModelFileError"}
        return ConfigError(why.says.splitlines() if own else [why.line])
    return part


def _refused(config: Config, ranks: int, problems: list[str], began: float) -> Row:
    took = time.monotonic() - began
    return Row(_describe(config, ranks), math.nan, None, took, refused=tuple(problems))


def _row(pool: Pool, case: Case, ranks: int, config: Config, true: Part, began: float) -> Row:
    layout = _describe(config, ranks)
    products = sum(len(shape) > 1 for shape in true.shapes.values())
    try:
        parts = pool.run(case, ranks)
    except RanksFailedError as error:
        took, why = time.monotonic() - began, error.first
        if why.kind == ConfigError.__name__:
            return _refused(config, ranks, why.says.splitlines(), began)
        what = f"a rank failed: {why.says if why.kind == 'ModelFileError' else why.line}"
        return Row(layout, math.inf, Difference(what, None, None, (), math.inf, 0.0), took)
    verdict = compare(parts, true, bounds(config.train.dtype, products))
    took = time.monotonic() - began
    return Row(
        layout=layout,
        worst=verdict.worst.relative,
        first=verdict.first,
        seconds=took,
        modules=verdict.modules if case.layers else None,
        left_out=verdict.left_out,
    )


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
    told |= {"documents": True} if config.data.documents else {}
    kind = ",".join(config.memory.checkpoint)
    told |= {"checkpoint": kind} if kind != "none" else {}
    offload = config.memory.offload
    return told | ({"offload": offload} if offload != "none" else {})
