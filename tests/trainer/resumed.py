"""Runs that stop and go on: what each rank held when it began and when it ended.

Imported by ranks and by tests. Random layouts A -> B for longer than CI has time for:
python -c 'from tests.trainer.resumed import main; main()' --count 100 --ranks 8
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.checkpoint import state
from trainer.checkpoint.saver import Saver
from trainer.config import ConfigError
from trainer.loop import Trainer
from trainer.parity.listen import fragment
from trainer.parity.outcome import Fragment
from trainer.parity.pool import Pool
from trainer.settings import load

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 4
HALF = 2
BOUND = 1e-10
MODEL = (
    "train.dtype=float64",
    "train.device=cpu",
    f"train.steps={STEPS}",
    "train.global_batch=8",
    "train.microbatch=1",
    "train.sequence=16",
    "model.layers=4",
    "model.width=32",
    "model.heads=8",
    "model.kv_heads=4",
    "model.mlp=48",
    "model.experts=4",
    "optim.warmup=1",
    "optim.clip=0.5",
    f"checkpoint.every={HALF}",
)
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2))

Held = dict[str, Fragment]
Layout = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class Run:
    """Settings, and the step before which the run ends."""

    settings: tuple[str, ...]
    stop: int
    full: str = ""
    """A file that the checkpoint after HALF steps finds no place for."""


@dataclass
class Seen:
    """One rank's view of a run."""

    first: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    began: Held = field(default_factory=dict)
    ended: Held = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    good: bool = True


def go(run: Run, world: int) -> Seen:
    """Resume if there is something to resume from, and run to `stop`."""
    trainer = Trainer(load(list(run.settings), world), world, torch.device("cpu"))
    seen = Seen()
    saver = Saver(trainer, say=seen.lines.append, warn=seen.lines.append)
    seen.first = saver.resume()
    seen.began = held(trainer)
    if run.full and trainer.mesh.rank == 0:
        part = Path(trainer.config.checkpoint.folder, f".part-step-{HALF:08d}")
        part.mkdir()
        (part / run.full).symlink_to("/dev/full")
    for number in range(seen.first, run.stop):
        result = trainer.step(number)
        seen.losses.append(result.loss)
        seen.norms.append(result.grad_norm)
        saver.after(number)
    seen.good = saver.close()
    seen.ended = held(trainer)
    return seen


def held(trainer: Trainer) -> Held:
    """A copy of all that a checkpoint of this rank holds."""
    return {one.key: fragment(one.values, one.place) for one in state.entries(trainer)}


def together(parts: Sequence[Held]) -> dict[str, np.ndarray]:
    """The whole tensors; elements that nobody holds are NaN, replicas must be equal."""
    whole: dict[str, np.ndarray] = {}
    for part in parts:
        for key, one in part.items():
            shape = one.place.shape
            into = whole.setdefault(key, np.full(shape, np.nan)).reshape(-1)
            where = one.place.pick(np.arange(into.size).reshape(shape))
            known = into[where]
            assert np.array_equal(known[~np.isnan(known)], one.values[~np.isnan(known)]), key
            into[where] = one.values
    return whole


def apart(ours: dict[str, np.ndarray], true: dict[str, np.ndarray]) -> float:
    """Largest difference relative to the largest true value of the same tensor."""
    assert ours.keys() == true.keys()
    return max(
        float(np.abs(ours[key] - one).max() / max(np.abs(one).max(), 1e-300))
        for key, one in true.items()
    )


def a_layout(choice: random.Random, ranks: int) -> Layout:
    """A legal layout of at most `ranks` ranks, as settings and their number of ranks."""
    sizes = [n for n in (1, 2, 4, 8) if n <= ranks]
    while True:
        dp, tp, pp = (choice.choice(sizes) for _ in range(3))
        cp = choice.choice((1, 1, 2))
        schedule, virtual = choice.choice(SCHEDULES)
        split = choice.choice(("even", "1,3", "3,1")) if pp == 2 and virtual == 1 else "even"
        settings = (
            f"parallel.dp={dp}",
            f"parallel.tp={tp}",
            f"parallel.pp={pp}",
            f"parallel.cp={cp}",
            f"parallel.ep={choice.choice((1, 2))}",
            f"parallel.zero={choice.randrange(4)}",
            f"parallel.replicate={choice.choice((1, 1, 2))}",
            f"parallel.sp={choice.choice(('true', 'false'))}",
            f"parallel.schedule={schedule}",
            f"parallel.virtual={virtual}",
            f"parallel.split={split}",
            f"parallel.bucket={choice.choice((4_000, 20_000, 10_000_000))}",
            f"mesh.order={choice.choice(('pp,dp,cp,tp', 'tp,cp,dp,pp', 'ep,dp,cp,tp,pp'))}",
            f"memory.offload={choice.choice(('none', 'none', 'optimizer', 'parameters'))}",
        )
        world = dp * tp * pp * cp
        if world <= ranks and virtual <= pp:
            try:
                load([*MODEL, *settings, "checkpoint.folder=x"], world)
            except ConfigError:
                continue
            return settings, world


class Reshard:
    """Ranks, a text, and what one process comes to without a stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = Pool(go)
        text = folder / "text"
        text.mkdir()
        noise = np.random.default_rng(5)
        for number in range(60):
            words = noise.integers(97, 123, size=int(noise.integers(3, 40)), dtype=np.uint8)
            (text / f"{number:03}.txt").write_bytes(words.tobytes())
        self.base = (*MODEL, f"data.path={text}")
        self.true = go(Run((*self.base, "checkpoint.every=0"), STEPS), 1)

    def run(
        self, settings: tuple[str, ...], world: int, stop: int, at: Path, full: str = ""
    ) -> list[Seen]:
        """One stretch of a run whose checkpoints are in `at`."""
        run = Run((*self.base, f"checkpoint.folder={at}", *settings), stop, full)
        return self.pool.run(run, world)

    def check(self, before: Layout, after: Layout, at: Path) -> None:
        """Half of the steps in one layout, the rest in another: as if never stopped."""
        old = self.run(*before, HALF, at)
        new = self.run(*after, STEPS, at)
        assert {one.first for one in new} == {HALF}
        saved, found = (together([one.ended for one in old]), together([one.began for one in new]))
        assert saved.keys() == found.keys() == self.true.began.keys()
        for key, whole in saved.items():
            assert np.array_equal(whole, found[key]), key  # a NaN, held by nobody, is not equal
        true = np.array(self.true.losses[HALF:])
        assert np.abs(np.array(new[0].losses) - true).max() < BOUND * np.abs(true).max()
        assert apart(together([one.ended for one in new]), together([self.true.ended])) < BOUND

    def close(self) -> None:
        """End the ranks."""
        self.pool.close()


def main() -> None:
    """Random pairs until `count`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    choice = random.Random(asked.seed)
    print(f"seed {asked.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        reshard = Reshard(Path(folder))
        for number in range(asked.count):
            before, after = (a_layout(choice, asked.ranks) for _ in range(2))
            print(f"{number} {before} -> {after}", file=sys.stderr)
            reshard.check(before, after, Path(folder, str(number)))
        reshard.close()
    print(f"{asked.count} pairs of layouts: all equal")
