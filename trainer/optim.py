"""AdamW, and clipping by the true global norm.

In: this rank's parameters and gradients, and which axes each is sharded over.
Out: one step. The norm is that of the whole gradient, as one process would see it: every element
of every parameter is counted by exactly one rank, whatever is split or replicated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config import OptimConfig
    from trainer.mesh import Mesh


def adamw(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, shapes: Mapping[str, torch.Size]
) -> torch.optim.AdamW:
    """Matrices decay, vectors (norms) do not; `shapes` are those of the whole parameters."""
    matrices = [p for path, p in parameters.items() if len(shapes[path]) > 1]
    vectors = [p for path, p in parameters.items() if len(shapes[path]) <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def have_moments(optimizer: torch.optim.AdamW) -> None:
    """Let the moments exist before the first step, as torch's fused AdamW begins them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state.get(p):
                optimizer.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }


def own_square(
    parameters: Mapping[str, nn.Parameter], sharded: Mapping[str, frozenset[str]], mesh: Mesh
) -> Tensor:
    """This rank's part of the squared norm of the gradient, float64; the world's sum is the whole.

    `sharded` names the axes over which each parameter is split; over all others it is replicated
    and only the ranks that own it count it.
    """
    counted = [
        p.grad
        for path, p in parameters.items()
        if p.grad is not None and mesh.owns(sharded.get(path, frozenset()))
    ]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    return nn.utils.get_total_norm(counted).double().square()


def clip(parameters: Mapping[str, nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale every gradient by min(1, limit / norm); limit 0 leaves them as they are."""
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    if limit > 0 and gradients:
        factor = (limit / norm).clamp(max=1.0).to(gradients[0])
        for one in gradients:
            one.mul_(factor)
