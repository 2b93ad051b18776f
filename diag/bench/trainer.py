"""The trainer beside torch's own pieces: tokens a second of ours over theirs, on two ranks.

Same model, batch, optimizer and machine; the two take turns (peers/duel.py), and a ratio comes from
pairs. The ratio of CPU time says what the same comparison would be on a machine with nothing else
to do. All on CPU and gloo, one thread a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from diag.bench.rows import Row, interval

CASES = {
    "ddp": "dp=2 / DistributedDataParallel",
    "fsdp": "zero=3 / FSDP2 fully_shard",
    "1f1b": "pp=2 1f1b / Schedule1F1B",
    "gpipe": "pp=2 gpipe / ScheduleGPipe",
    "tensor": "tp=2 / DTensor parallelize_module",
}
GOAL = 0.97


def duel(case: str, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds a step of both sides, wall and CPU, by round; CalledProcessError when it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=2", "-m", "diag.bench.peers.duel", case, str(rounds)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    told: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return told


def measure(rounds: int) -> list[Row]:
    """Two rows a case; takes some minutes."""
    rows = []
    for case, name in CASES.items():
        told = duel(case, rounds)
        pairs = list(zip(told["theirs"], told["ours"], strict=True))
        wall = interval([theirs[0] / ours[0] for theirs, ours in pairs])
        cpu = interval([theirs[1] / ours[1] for theirs, ours in pairs])
        rows += [
            Row(f"{name}, tokens/s", *_bounds(wall), goal=GOAL, at_least=True),
            Row(f"{name}, tokens/CPU s", *_bounds(cpu)),
        ]
    return rows


def _bounds(found: tuple[float, float, float]) -> tuple[float, str, float, float]:
    middle, low, high = found
    return middle, "x", low, high
