"""The bundled trainer under watch, healthy or with one fault, and whether the verdict found it.

In: a fault's name, a layout, a seed that places the fault. Out: the outcome of one demonstration.
The fault is real (see trainer/faults.py); the verdict comes the same way as for any other job.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYOUT = "tp=2 pp=2"
"""Where a case has none of its own."""
THREE = "dp=3"
"""The fewest replicas among which one is the odd one out."""
WORLD = 4
"""Ranks of the demonstration, unless the layout needs more."""

_MICROBATCHES = 4
"""Of 2 samples, in a step of configs/small.toml."""


@dataclass(frozen=True)
class Case:
    """One thing to demonstrate."""

    name: str
    cause: str | None
    """Id of the cause that the verdict has to name; None: a healthy verdict."""
    does: str
    stops: bool = False
    """Whether the job stands still, so that the supervisor has to notice."""
    placed: bool = True
    """Whether it happens on one rank at one step."""
    rank: int | None = None
    """The rank on which alone it can be; None: any."""
    blamed: bool = True
    """Whether what is on record tells the rank; else the verdict must name none."""
    settings: tuple[str, ...] = ()
    """What the job is told beside layout and fault."""
    layout: str | None = None
    """Instead of the default one, where the fault cannot be on that."""


CASES = {
    case.name: case
    for case in (
        Case("healthy", None, "nothing is wrong", placed=False),
        Case("rank-dies", "hang.rank-died", "one rank is killed (SIGKILL) in a step"),
        Case("rank-stalls", "hang.rank-stalled", "one rank is stuck loading its data", stops=True),
        Case(
            "collective-mismatch",
            "hang.collective-mismatch",
            "one rank joins a collective with another shape",
            stops=True,
        ),
        Case(
            "collective-dtype",
            "hang.collective-mismatch",
            "one rank joins a collective with another dtype",
            stops=True,
            layout=THREE,
        ),
        Case(
            "collective-extra",
            "hang.collective-mismatch",
            "one rank issues a collective that no other does",
            stops=True,
            layout=THREE,
        ),
        Case(
            "rank0-collective",
            "hang.collective-extra",
            "rank 0 alone enters a barrier",
            stops=True,
            layout=THREE,
            rank=0,
        ),
        Case(
            "uneven-inputs",
            "hang.uneven-inputs",
            "one rank has fewer batches and leaves",
            stops=True,
            layout=THREE,
        ),
        Case("straggler", "slow.straggler-compute", "one rank computes slowly"),
        Case(
            "slow-data",
            "slow.straggler-input",
            "one rank waits for its data in every step",
            layout=THREE,
        ),
        Case(
            "nan",
            "numeric.nan",
            "a module of one rank gives NaN",
            blamed=False,
            settings=("log.every=1",),
            layout=THREE,
        ),
        Case("oom", "oom.oversized-request", "one rank asks for far more memory than there is"),
        Case(
            "bad-topology-plan",
            "link.tp-crosses-nodes",
            "a plan whose tensor groups span two nodes, judged before launch",
            placed=False,
        ),
    )
}


@dataclass(frozen=True)
class Placed:
    """A case with its place: which rank, which step, in which layout."""

    case: Case
    world: int
    layout: dict[str, int]
    rank: int
    step: int
    seed: int


def place(case: Case, layout: dict[str, int], seed: int) -> Placed:
    """Choose rank and step by `seed`; without a dp of its own the layout fills WORLD ranks."""
    needed = math.prod(size for axis, size in layout.items() if axis != "ep")  # a part of dp and cp
    world = needed if "dp" in layout or WORLD % needed else WORLD
    dice = random.Random(f"{case.name} {sorted(layout.items())} {seed}")  # noqa: S311  a placement, no secret
    rank, step = dice.randrange(world), dice.randrange(8, 15)
    return Placed(case, world, layout, rank if case.rank is None else case.rank, step, seed)


def job(placed: Placed) -> list[str]:
    """The command that trains under this fault."""
    spec = importlib.util.find_spec("trainer")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the bundled trainer is not installed; `pip install -e .` brings it"
        )
    config = Path(spec.origin).parent / "configs" / "small.toml"
    replicas = placed.layout.get("dp", 1)
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={placed.world}", "-m", "trainer", "--config", str(config),
        *(f"parallel.{axis}={size}" for axis, size in placed.layout.items()),
        *([f"train.global_batch={2 * replicas}"] if _MICROBATCHES % replicas else []),
        *(["model.experts=8"] if placed.layout.get("ep", 1) > 1 else []),
        *placed.case.settings,
    ]  # fmt: skip
    if placed.case.placed:
        words += [
            f"faults.kind={placed.case.name}",
            f"faults.rank={placed.rank}",
            f"faults.step={placed.step}",
        ]
    return words


def refused(placed: Placed) -> list[str]:
    """Why the bundled model cannot be laid out so; empty when it can."""
    from trainer.config import ConfigError
    from trainer.settings import load

    try:
        words = job(placed)
        load(words[words.index("--config") :], placed.world)
    except ConfigError as wrong:
        return wrong.problems
    return []


def run(placed: Placed, run_dir: Path | None) -> Path | None:
    """Train under watch; the run directory, or None when there could be none."""
    from diag import supervise
    from diag.watch import HangPolicy

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = supervise.Options(
        run_dir=run_dir,
        name=f"demo-{placed.case.name}",
        on_hang="kill" if placed.case.stops else "report",
        policy=HangPolicy(after=8.0) if placed.case.stops else HangPolicy(),
    )
    return supervise.run(job(placed), options).run_dir


def judge_plan(run_dir: Path | None) -> Path:
    """Diagnose the bundled topology and plan as `diag analyze` would; the reports' folder."""
    from collectors.readers import read_paths
    from diag import rundir
    from playbooks import engine
    from playbooks.report import html, markdown, text

    where = rundir.make("demo-bad-topology-plan") if run_dir is None else rundir.claim(run_dir)[0]
    data = Path(__file__).parent / "data" / "bad-topology-plan"
    shutil.copytree(data, where, dirs_exist_ok=True)
    collected = read_paths([str(where)])
    report = engine.diagnose(collected)
    (where / "report.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (where / "report.md").write_text(markdown.render(report))
    (where / "report.html").write_text(html.render(report, collected))
    sys.stderr.write(text.render(report, colour=sys.stderr.isatty()) + "\n")
    return where


@dataclass(frozen=True)
class Result:
    """What the verdict said, held against what was done."""

    right: bool
    said: str
    seconds: float | None
    """From the last progress to the verdict, where the job stood still."""


def hold(placed: Placed, answer: dict[str, Any], run: dict[str, Any]) -> Result:
    """Compare a `diag.report/1` and its run.json with the truth."""
    verdict = answer.get("verdict") or {}
    cause, ranks = verdict.get("cause"), verdict.get("ranks", [])
    if placed.case.cause is None:
        right = answer.get("health") is not None
    else:
        right = cause == placed.case.cause
        if placed.case.placed:
            right = right and ranks == ([placed.rank] if placed.case.blamed else [])
    said = "healthy" if answer.get("health") else f"{cause or 'abstained'}"
    if ranks:
        said += " on rank " + ", ".join(map(str, ranks))
    if verdict:
        said += f" ({verdict['confidence']})"
    seconds = None
    if run.get("hangs") and run["hangs"][0].get("verdict_ns"):
        first = run["hangs"][0]
        seconds = (first["verdict_ns"] - first["since_ns"]) / 1e9
    return Result(right, said, seconds)
