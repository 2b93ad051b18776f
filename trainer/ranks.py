"""This process as a rank: its device, and the default process group.

In: what the launcher put into the environment (torchrun's LOCAL_RANK, RANK, WORLD_SIZE ...).
Out: a device of its own, and the group that all ranks enter at the start and leave at the end.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.config import ConfigError


def pick_device(wanted: str) -> torch.device:
    """The device of this rank; ConfigError when CUDA is asked for and absent, or too few GPUs."""
    cuda = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not cuda):
        return torch.device("cpu")
    if not cuda:
        raise ConfigError(["train.device=cuda, but torch sees no CUDA device (train.device=cpu)"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            [
                (
                    f"local rank {local} has no GPU of its own: this node has "
                    f"{torch.cuda.device_count()} (--nproc-per-node, or train.device=cpu)"
                )
            ]
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def join(world: int, device: torch.device, timeout: float) -> None:
    """Enter the default process group that the launcher described; alone, there is none."""
    if world > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )


def leave() -> None:
    """Leave the default process group after a run that ended well."""
    if dist.is_initialized():
        dist.destroy_process_group()
