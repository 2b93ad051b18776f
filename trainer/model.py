"""A decoder-only transformer: pre-norm, rotary positions, grouped-query attention, an MLP.

It knows nothing of parallelism. What it offers instead: `chain()` lists its parts so that each
takes what the one before returns, and attention infers its heads from the width of its projections.
`initial_value` gives the start of a parameter from its name alone, whoever holds whatever part.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

from trainer import documents as documents_file
from trainer.mlp import MLP, MixtureOfExperts

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.documents import Documents

IGNORE = -1
"""A target that counts for nothing: where one document ends and the next begins."""
_STD = 0.02
"""Spread of initial matrices (Radford et al. 2019)."""


class Attention(nn.Module):
    """Causal self-attention; several query heads share a key and value head (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head = config.width // config.heads
        self.rope_base = config.rope_base
        shared = self.head * config.kv_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, shared, bias=False)
        self.value = nn.Linear(config.width, shared, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """(batch, sequence, width) to the same; heads come from what the projections return."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        table = self.table(x.shape[1], query.dtype, x.device)
        query, key = rotate(query, table), rotate(key, table)
        mixed = self.attend(query, key, value, documents)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles of the `length` positions that this module sees."""
        return rotary_table(length, self.head, self.rope_base, dtype, device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
    ) -> Tensor:
        """(batch, heads, sequence, head), fewer heads of keys and values, to the queries' shape."""
        serve = query.shape[1] // key.shape[1]
        if serve > 1:
            key, value = (one.repeat_interleave(serve, dim=1) for one in (key, value))
        if documents is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        rows = torch.arange(query.shape[-2])
        return documents_file.attention(query, key, value, rows, documents, stretch=len(rows))


class Block(nn.Module):
    """Attention, then MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MixtureOfExperts(config) if config.experts else MLP(config)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """(batch, sequence, width) to the same."""
        x = x + self.attention(self.attention_norm(x), documents)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Transformer(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.width
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def chain(self) -> list[tuple[str, nn.Module]]:
        """The parts in the order in which data passes them, by path."""
        parts: list[tuple[str, nn.Module]] = []
        for name, child in self.named_children():
            if isinstance(child, nn.ModuleDict):
                parts += [(f"{name}.{inner}", part) for inner, part in child.items()]
            else:
                parts.append((name, child))
        return parts

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """(batch, sequence) tokens to (batch, sequence, vocabulary) logits."""
        for _, part in self.chain():
            x = part(x, documents) if isinstance(part, Block) else part(x)
        return x


class NextTokenLoss(nn.Module):
    """Cross-entropy summed over the valid targets; whoever calls it divides by their number."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(batch, sequence, vocabulary) and (batch, sequence) to a sum in nats, never in bf16."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )


@lru_cache(maxsize=8)
def rotary_table(
    sequence: int, head: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, each (sequence, head / 2); arXiv:2104.09864."""
    pairs = torch.arange(0, head, 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64), base ** (-pairs / head))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pair (i, i + head / 2) of (..., sequence, head) by its position's angle."""
    cos, sin = table
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def initial_value(path: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    """The whole parameter `path` at the start, float32 on the CPU, from `seed` and its name alone.

    Norm weights are 1 and biases 0. Matrices that write into the residual stream are scaled by
    1 / sqrt(2 x layers), so that its spread does not grow with depth (Radford et al. 2019).
    """
    if len(shape) == 1:
        return torch.zeros(shape) if path.endswith("bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    writes = path.endswith((".out.weight", ".down.weight"))
    std = _STD / math.sqrt(2 * layers) if writes else _STD
    return torch.normal(0.0, std, shape, generator=generator)


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.width, eps=config.norm_eps)
