"""A plain DDP training script that knows nothing of diag: steps of some 40 ms a core and rank."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main(steps: int = 20, width: int = 640) -> None:
    """Train a small network for `steps` steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = TensorDataset(torch.randn(1024, width), torch.randn(1024, 1))
    sampler = RandomSampler(data, replacement=True, num_samples=64 * steps)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
