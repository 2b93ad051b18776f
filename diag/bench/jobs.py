"""The jobs that the benchmarks time; they know nothing of diag and print one line of JSON each.

    python jobs.py steps N WIDTH     DDP steps; prints {"seconds": median step}
    python jobs.py small N           N tiny all_reduces; prints {"seconds": mean per operation}

Run under torchrun. Rank 0 prints. Times exclude start-up and the first tenth.
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


def steps(count: int, width: int) -> float:
    """Median seconds of a DDP step: 8 layers of `width`, batch 64."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(64, width)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[count // 10 :])


def small(count: int) -> float:
    """Mean seconds of an all_reduce of 16 floats that the host waits for."""
    values = torch.ones(16)
    for _ in range(count // 10):
        dist.all_reduce(values)
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(values)
    return (time.perf_counter() - start) / count


def main(kind: str, *numbers: str) -> None:
    """Run one job and print its figure."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    jobs: dict[str, Callable[..., float]] = {"steps": steps, "small": small}
    figure = jobs[kind](*map(int, numbers))
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": figure}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
