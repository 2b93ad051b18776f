"""A model of your own, as `diag parity --model` and `model.file=` take it: a small GPT with biases.

    diag parity --model trainer/examples/gpt.py parallel.dp=2 parallel.tp=2 parallel.sp=true
    diag parity --model trainer/examples/gpt.py:tied parallel.dp=2 parallel.zero=1
    torchrun --nproc-per-node 4 -m trainer model.file=trainer/examples/gpt.py parallel.pp=2

It knows nothing of parallelism. It offers a `chain()` of parts and their `width` for pipelines, and
a PLAN for tensor parallelism, in which heads come from the width of what the projections return.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

from trainer.model import rotary_table, rotate

WIDTH, HEAD, LAYERS, VOCABULARY = 32, 8, 4, 256

PLAN = {
    "embed": "vocabulary",
    "blocks.*.attention": "entry",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp": "entry",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "head": "head",
}


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        query, key, value = (
            project(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        table = rotary_table(x.shape[1], HEAD, 10000.0, x.dtype, x.device)
        query, key = rotate(query, table), rotate(key, table)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention, then MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def chain(self) -> list[tuple[str, nn.Module]]:
        """The parts in the order in which data passes them."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embed", self.embed), *blocks, ("norm", self.norm), ("head", self.head)]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence) byte values to (batch, sequence, vocabulary) logits."""
        for _, part in self.chain():
            x = part(x)
        return x


def model() -> GPT:
    """The GPT, started as torch starts it."""
    return GPT()


def tied() -> GPT:
    """The same, reading and writing bytes with one matrix."""
    gpt = GPT()
    nn.init.normal_(gpt.embed.weight, std=0.02)
    gpt.head.weight = gpt.embed.weight
    return gpt
