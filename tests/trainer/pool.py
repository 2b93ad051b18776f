"""Four ranks that live as long as a test module: torch is imported once, not once a case.

`Pool.run(case)` trains the case on all four and returns what one process would have: losses, norms,
and every parameter's gradient and value put together from the shards. `whole(case)` is one process.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from collectors import annotate
from tests.trainer import bugs
from tests.trainer.recorder import Recorder
from trainer.loop import Trainer
from trainer.settings import load

WORLD = 4
STEPS = 3


class DisagreementError(Exception):
    """Ranks that must hold the same do not."""


@dataclass(frozen=True)
class Case:
    """What to train, and which bug to plant (empty: none)."""

    settings: tuple[str, ...]
    bug: str = ""


@dataclass
class Outcome:
    """What three steps came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    """By step and parameter, after clipping."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    heard: list[Recorder] = field(default_factory=list)
    """What each rank told whoever listens, by rank."""


@dataclass
class Part:
    """One rank's outcome, and how to put it beside the others'."""

    outcome: Outcome
    dims: dict[str, int]
    tp: int


def train(case: Case, world: int) -> Part:
    """Run the case on this rank of `world`."""
    recorder = Recorder()
    annotate.listen(recorder)
    config = load(list(case.settings), world)
    trainer = Trainer(config, world, torch.device("cpu"))
    out = Outcome()
    planted: AbstractContextManager[Any] = (
        bugs.planted(case.bug, trainer) if case.bug else nullcontext()
    )
    with planted:
        for number in range(STEPS):
            result = trainer.step(number)
            out.losses.append(result.loss)
            out.norms.append(result.grad_norm)
            out.tokens.append(result.tokens)
            out.gradients.append(
                {path: p.grad.numpy().copy() for path, p in trainer.built.parameters.items()}
            )
    out.weights = {path: p.detach().numpy().copy() for path, p in trainer.built.parameters.items()}
    out.heard = [recorder]
    annotate.listen(None)
    return Part(out, dict(trainer.built.dims), trainer.mesh["tp"].index)


def whole(case: Case) -> Outcome:
    """The case in one process."""
    return train(case, 1).outcome


def together(parts: list[Part]) -> Outcome:
    """One outcome from all ranks'; DisagreementError where ranks that must agree do not."""
    first = parts[0].outcome
    for part in parts[1:]:
        if part.outcome.losses != first.losses or part.outcome.norms != first.norms:
            raise DisagreementError("ranks saw different losses or gradient norms")
    return Outcome(
        losses=first.losses,
        norms=first.norms,
        tokens=first.tokens,
        gradients=[_join([(p, p.outcome.gradients[step]) for p in parts]) for step in range(STEPS)],
        weights=_join([(p, p.outcome.weights) for p in parts]),
        heard=[part.outcome.heard[0] for part in parts],
    )


def _join(held: list[tuple[Part, dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Whole parameters from shards; replicas must be equal to the last bit."""
    joined = {}
    for path in dict.fromkeys(path for _, values in held for path in values):
        pieces: dict[int, np.ndarray] = {}
        holders = [(part, values[path]) for part, values in held if path in values]
        for part, value in holders:
            at = part.tp if path in part.dims else 0
            known = pieces.setdefault(at, value)
            if not np.array_equal(known, value):
                raise DisagreementError(f"replicas of {path} differ")
        dim = holders[0][0].dims.get(path, 0)
        joined[path] = np.concatenate([pieces[i] for i in sorted(pieces)], axis=dim)
    return joined


class Pool:
    """Four processes in one gloo group; close() ends them."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes = []
        self._processes = []
        for rank in range(WORLD):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_serve, args=(rank, str(Path(self._folder.name, "store")), theirs)
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Case) -> Outcome:
        """Train the case on the four ranks."""
        for pipe in self._pipes:
            pipe.send(case)
        answers = [pipe.recv() for pipe in self._pipes]
        failed = [answer for answer in answers if isinstance(answer, str)]
        assert not failed, failed[0]
        return together(answers)

    def close(self) -> None:
        """End the ranks, by asking."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(rank: int, store: str, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    while (case := pipe.recv()) is not None:
        try:
            pipe.send(train(case, WORLD))
        except BaseException:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()
