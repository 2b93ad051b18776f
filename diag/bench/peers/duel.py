"""The trainer and a plain script in turns, on the same two ranks, the same model and batch.

    torchrun --nproc-per-node 2 -m diag.bench.peers.duel CASE ROUNDS

Rank 0 prints one line of JSON: {"ours": [[wall, cpu], ...], "theirs": ...}, seconds a step of each
round; cpu is the time that both processes computed (or polled), which the machine's other work
disturbs less. They take turns within each round, so that such work meets both alike. Both start
from the same weights, and it is an error if they do not learn the same.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.loop import Trainer
from trainer.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[int], float | None]

RANKS = 2
_WARM = 3
_STEPS = 4
"""A turn."""
_APART = 0.02
"""How far losses may be: the trainer weighs tokens over all ranks, a plain script its own."""
_BASE = (
    "train.device=cpu",
    "train.global_batch=8",
    "train.microbatch=4",
    "train.steps=1000000",
    "model.width=256",
    "model.mlp=768",
    "optim.lr=1e-3",
    "optim.warmup=0",
    "optim.lr_final=1",
)


_STAGES = ("parallel.pp=2", "train.microbatch=1")
CASES = {
    "ddp": ("ddp", ("parallel.dp=2",)),
    "fsdp": ("fsdp", ("parallel.dp=2", "parallel.zero=3")),
    "1f1b": ("pipeline", (*_STAGES, "parallel.schedule=1f1b")),
    "gpipe": ("pipeline", (*_STAGES, "parallel.schedule=gpipe")),
    "tensor": ("tensor", ("parallel.tp=2",)),
}
"""By the names of diag/bench/trainer.py: the plain script, and the trainer's settings for it."""


def main(name: str, rounds: int) -> None:
    """Run one case; ValueError when the two did not learn the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    script, settings = CASES[name]
    config = load([*_BASE, *settings], RANKS)
    trainer = Trainer(config, RANKS, torch.device("cpu"))
    peer = importlib.import_module(f"diag.bench.peers.{script}").Peer(config)
    sides: dict[str, Step] = {"ours": lambda n: trainer.step(n).loss, "theirs": peer.step}
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        first = 0 if turn == 0 else _WARM + (turn - 1) * _STEPS
        for side in order:
            count = _STEPS if turn else _WARM
            dist.barrier()
            began, computed = time.perf_counter(), time.process_time()
            for number in range(first, first + count):
                loss = sides[side](number)
            cpu = torch.tensor(time.process_time() - computed)
            dist.all_reduce(cpu)
            if turn:
                seconds[side].append(((time.perf_counter() - began) / count, cpu.item() / count))
            losses[side] = _mean(loss)
    if abs(losses["ours"] / losses["theirs"] - 1) > _APART:
        raise ValueError(f"not the same training: {losses}")
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def _mean(loss: float | None) -> float:
    """Over the ranks that have one."""
    pair = torch.tensor([0.0, 0.0] if loss is None else [loss, 1.0], dtype=torch.float64)
    dist.all_reduce(pair)
    return float(pair[0] / pair[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
