"""The sizes of a decoder-only transformer, and what follows from them: parameters and FLOPs.

In: sizes, as presets, a HF config.json or our TOML give them. Out: Shape, which counts parameters
by how a layout can share them: over tp, over ep, or not at all. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank projections."""

    query_rank: int
    key_rank: int
    plain: int
    """Elements of a head's query and key without positions."""
    rotary: int
    value: int


@dataclass(frozen=True)
class Layer:
    """Parameters of one layer by who can share them."""

    sharded: int
    """Split over tp."""
    replicated: int
    """Norms, routers and the like: whole on every tp rank."""
    expert: int
    """All experts together; split over ep, and over tp."""
    active_expert: int
    """Of the experts, those that one token passes."""

    @property
    def dense(self) -> int:
        """All but experts."""
        return self.sharded + self.replicated


@dataclass(frozen=True)
class Shape:
    """One model."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    """Hidden size of a dense MLP."""
    vocabulary: int
    head: int = 0
    """Elements of a head; 0: width / heads."""
    matrices: int = 3
    """Of an MLP: 3 gated (SwiGLU), 2 plain."""
    norm: int = 1
    """Vectors of a norm: 1 RMSNorm, 2 LayerNorm."""
    biases: bool = False
    query_biases: bool = False
    """Biases of query, key and value alone."""
    tied: bool = False
    """The head is the embedding."""
    positions: int = 0
    """Learned positions."""
    dropout: bool = False
    """Masks are kept from forward to backward."""
    experts: int = 0
    top_k: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    """Hidden size of what each token passes beside its experts."""
    dense_layers: int = 0
    """First layers without experts."""
    router_bias: bool = False
    latent: Latent | None = None

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries, a position."""
        if self.latent:
            return self.heads * (self.latent.plain + self.latent.rotary)
        return self.heads * (self.head or self.width // self.heads)

    @property
    def value_width(self) -> int:
        """Elements that attention gives to its output projection."""
        return self.heads * self.latent.value if self.latent else self.query_width

    @property
    def key_value_width(self) -> int:
        """Elements of keys and values together, as attention reads them."""
        if self.latent:
            return self.query_width + self.value_width
        return 2 * self.kv_heads * (self.head or self.width // self.heads)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is experts."""
        return bool(self.experts) and layer >= self.dense_layers

    def expert_layers(self, layers: Sequence[int]) -> int:
        """How many of these have experts."""
        if not self.experts:
            return 0
        return sum(at >= self.dense_layers for at in layers)

    def layer(self, at: int) -> Layer:
        """Parameters of layer `at`."""
        sharded, replicated = self._attention()
        replicated += 2 * self.norm * self.width
        if not self.has_experts(at):
            sharded += self._mlp(self.mlp)
            if self.biases:
                sharded, replicated = sharded + self.mlp, replicated + self.width
            return Layer(sharded, replicated, 0, 0)
        one = self._mlp(self.expert_mlp)
        replicated += self.experts * (self.width + self.router_bias)
        sharded += self._mlp(self.shared_mlp)
        return Layer(sharded, replicated, self.experts * one, self.top_k * one)

    @property
    def embedding(self) -> int:
        """The lookup of tokens, and of positions."""
        return (self.vocabulary + self.positions) * self.width

    @property
    def output(self) -> int:
        """The matrix before the logits, whoever's it is."""
        return self.vocabulary * self.width

    @property
    def last_norm(self) -> int:
        """The norm behind all layers."""
        return self.norm * self.width

    @property
    def parameters(self) -> int:
        """All of them."""
        layers = [self.layer(at) for at in range(self.layers)]
        inside = sum(one.dense + one.expert for one in layers)
        return inside + self.embedding + self.last_norm + (0 if self.tied else self.output)

    def products(self, at: int) -> int:
        """Elements of the matrices that one token meets in layer `at`."""
        vectors = 2 * self.norm * self.width + self._vectors(at)
        layer = self.layer(at)
        return layer.dense - vectors + layer.active_expert

    def flops(self, sequence: int) -> float:
        """FLOPs of one token's forward and backward, causal: 6 a matrix element; attention as in
        `trainer/flops.py`, 2 products forward and 4 backward over half of the square."""
        inside = sum(self.products(at) for at in range(self.layers))
        return 6.0 * (inside + self.output) + self.layers * 3 * self.scores(sequence)

    def scores(self, sequence: int) -> float:
        """FLOPs of attention's two products, a token and layer, forward, causal: a position sees
        (sequence + 1) / 2 others on average."""
        return 2.0 * (self.query_width + self.value_width) * (sequence + 1) / 2

    def _mlp(self, hidden: int) -> int:
        return self.matrices * self.width * hidden

    def _attention(self) -> tuple[int, int]:
        """(split over tp, not split)."""
        if (low := self.latent) is None:
            both = self.query_width + self.key_value_width
            sharded = self.width * (both + self.value_width)
            wide = both if self.biases or self.query_biases else 0
            return sharded + wide, self.width if self.biases else 0
        sharded = low.query_rank * self.query_width
        sharded += low.key_rank * self.heads * (low.plain + low.value)
        sharded += self.value_width * self.width
        down = self.width * (low.query_rank + low.key_rank + low.rotary)
        return sharded, down + low.query_rank + low.key_rank

    def _vectors(self, at: int) -> int:
        """Biases and inner norms, which no product multiplies with."""
        if self.latent:
            extra = self.latent.query_rank + self.latent.key_rank
            return extra + (self.experts if self.router_bias and self.has_experts(at) else 0)
        wide = self.query_width + self.key_value_width
        if self.biases:
            return wide + 2 * self.width + self.mlp
        return wide if self.query_biases else 0
