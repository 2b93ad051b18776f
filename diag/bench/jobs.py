"""The jobs that the benchmarks time; they know nothing of diag and print one line of JSON each.

    python jobs.py steps N WIDTH     DDP steps; prints {"seconds": median step, "cpu": mean}
    python jobs.py small N           N tiny all_reduces; the same for one operation, mean

Run under torchrun. Rank 0 prints: wall time, and CPU time of its process (all threads), which other
processes on the machine disturb less. Both exclude start-up and the first tenth.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable


def steps(count: int, width: int) -> tuple[float, float]:
    """(median wall, mean CPU) seconds of a DDP step: 8 layers of `width`, batch 64."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(64, width)
    times = []
    ran = 0.0
    for number in range(count):
        if number == count // 10:
            ran = time.process_time()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    kept = times[count // 10 :]
    return statistics.median(kept), (time.process_time() - ran) / len(kept)


def small(count: int) -> tuple[float, float]:
    """(wall, CPU) seconds, both means, of an all_reduce of 16 floats that the host waits for."""
    values = torch.ones(16)
    for _ in range(count // 10):
        dist.all_reduce(values)
    start, ran = time.perf_counter(), time.process_time()
    for _ in range(count):
        dist.all_reduce(values)
    return (time.perf_counter() - start) / count, (time.process_time() - ran) / count


def main(kind: str, *numbers: str) -> None:
    """Run one job and print its figure."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    jobs: dict[str, Callable[..., tuple[float, float]]] = {"steps": steps, "small": small}
    wall, cpu = jobs[kind](*map(int, numbers))
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": wall, "cpu": cpu}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
