"""Activation checkpointing: what a part keeps from its forward to its backward.

In: the words of memory.checkpoint, one for all stages or one a stage. Out: for each part a Keep,
and `run`, which runs a part so. Gradients are the same bits whatever is kept.

    none       everything autograd saves
    full       the input of the layer; all else is computed again in backward
    every-K    full for layers 0, K, 2K ..., none for the others
    selective  the input and what matrix products gave, which cost most; attention, norms and
               activation functions are computed again (Korthikanti et al. 2022, arXiv:2205.05198)
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class Keep(Enum):
    """What stays in memory from forward to backward."""

    ALL = "all"
    PRODUCTS = "products"
    INPUT = "input"


def keep(path: str, words: tuple[str, ...], stage: int) -> Keep:
    """What the part `path` of `stage` keeps; only layers are ever computed again."""
    container, _, number = path.rpartition(".")
    word = words[stage] if len(words) > 1 else words[0]
    if not container or not number.isdigit() or word == "none":
        return Keep.ALL
    if word == "selective":
        return Keep.PRODUCTS
    every = 1 if word == "full" else int(word.removeprefix("every-"))
    return Keep.ALL if int(number) % every else Keep.INPUT


def run(module: nn.Module, told: tuple[Any, ...], kept: Keep) -> Tensor:
    """`module(*told)`, of which `kept` stays; random numbers must not be a generator's."""
    if kept is Keep.ALL:
        whole: Tensor = module(*told)
        return whole
    import torch  # not above: words are judged before torch is needed
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    more: dict[str, Any] = {}
    if kept is Keep.PRODUCTS:  # of activations and weights; those of attention are batched (bmm)
        saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        more["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    out: Tensor = checkpoint(module, *told, use_reentrant=False, preserve_rng_state=False, **more)
    return out
