"""The same training started by `python spawn_ddp.py` through torch.multiprocessing.spawn."""

from __future__ import annotations

import os
import socket
import sys

import torch.multiprocessing as mp
from plain_ddp import main


def rank_main(rank: int, world: int, port: int, steps: int) -> None:
    """One rank: what torchrun would have set, then the training."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    main(steps)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(rank_main, args=(2, free, int(sys.argv[1]) if sys.argv[1:] else 20), nprocs=2)
