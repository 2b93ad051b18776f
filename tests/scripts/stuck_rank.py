"""Two or more ranks in step, one of which sleeps in step 5 for `seconds`; no tidy end.

The process group is never destroyed, as in many scripts.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def read_shard(seconds: float) -> None:
    """Where the rank is stuck."""
    time.sleep(seconds)


for step in range(20):
    if dist.get_rank() == 1 and step == 5:
        read_shard(float(sys.argv[1]))
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
print(f"done {dist.get_rank()}", flush=True)
