"""Runs that are killed while they save, again and again, and what is left each time.

More often than CI has time for:
python -c 'from tests.trainer.killed import main; main()' --count 500 --ranks 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.trainer.resumed import Held, apart, held, together
from trainer.checkpoint.saver import Saver
from trainer.loop import Trainer
from trainer.settings import load

TINY = (
    "train.device=cpu",
    "train.dtype=float64",
    "train.steps=100000",
    "train.global_batch=2",
    "train.microbatch=1",
    "train.sequence=8",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=2",
    "model.mlp=16",
    "checkpoint.every=1",
)
LONGEST = 0.25
"""Seconds after its first step in which a run is killed: about a dozen saves."""
PATIENCE = 120.0


def forever(settings: tuple[str, ...], rank: int, world: int, store: str, stepped: Any) -> None:
    """Train and save until killed; `stepped` is set after the first step."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    trainer = Trainer(load(list(settings), world), world, torch.device("cpu"))
    saver = Saver(trainer, say=_silent, warn=_silent)
    for number in range(saver.resume(), trainer.config.train.steps):
        trainer.step(number)
        saver.after(number)
        stepped.set()


class Victims:
    """A chain of killed runs, each of which goes on where the one before left off."""

    def __init__(self, folder: Path, seed: int, ranks: int) -> None:
        (folder / "text.txt").write_bytes(bytes(range(32, 120)) * 30)
        base = (*TINY, f"data.path={folder / 'text.txt'}")
        self.folder = folder / "checkpoints"
        self.base = (*base, f"checkpoint.folder={self.folder}")
        self.layout = ("parallel.dp=2", "parallel.zero=2") if ranks == 2 else ()
        self.ranks = ranks
        self.choice = random.Random(seed)
        self.halves = 0
        """Times that a half-written checkpoint was left."""
        self._server = multiprocessing.get_context("forkserver")
        self._server.set_forkserver_preload(["tests.trainer.killed"])
        self._straight = Trainer(load([*base, "checkpoint.every=0"], 1), 1, torch.device("cpu"))
        self._at = 0

    def kill_one(self, number: int) -> int:
        """Start a run, kill it, check what is left; the steps that the checkpoint has."""
        stepped = self._server.Event()
        store = str(self.folder.parent / f"store-{number}")
        settings = (*self.base, *self.layout)
        ranks = [
            self._server.Process(target=forever, args=(settings, rank, self.ranks, store, stepped))
            for rank in range(self.ranks)
        ]
        for one in ranks:
            one.start()
        assert stepped.wait(PATIENCE), [one.exitcode for one in ranks]
        time.sleep(self.choice.uniform(0, LONGEST))
        self.choice.shuffle(ranks)
        for one in ranks:
            one.kill()
            time.sleep(self.choice.choice((0.0, 0.02)))
        for one in ranks:
            one.join()
            one.close()
        self.halves += any(self.folder.glob(".part-step-*"))
        return self.check()

    def check(self) -> int:
        """The last good one loads, and is what a run that was never killed has at that step."""
        left = Trainer(load(list(self.base), 1), 1, torch.device("cpu"))
        done = Saver(left, say=_silent, warn=_silent).resume()
        while self._at < done:
            self._straight.step(self._at)
            self._at += 1
        if self._at == done:  # else an even older one, which was checked before
            ours, true = held(left), held(self._straight)
            if self.ranks == 1:
                assert equal(ours, true), f"the checkpoint after {done} steps is not what was saved"
            else:
                assert apart(together([ours]), together([true])) < 1e-10
        return done


def equal(one: Held, other: Held) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(fragment.values, other[key].values) for key, fragment in one.items()
    )


def _silent(_line: str) -> None:
    """Nobody reads these runs."""


def main() -> None:
    """Kill `count` runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", file=sys.stderr)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        victims = Victims(Path(folder), asked.seed, asked.ranks)
        done = 0
        for number in range(asked.count):
            done = victims.kill_one(number)
    print(
        f"{asked.count} runs of {asked.ranks} rank(s) killed, {victims.halves} left a half-written "
        f"checkpoint; the last good one loaded each time, {done} steps in all"
    )
