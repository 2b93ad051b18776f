"""The MLP of a block: dense SwiGLU, or experts of which a router gives every token a few.

In: (batch, sequence, width). Out: the same. It knows nothing of parallelism; what another layout
must do differently has a method of its own: `gather` and `keep_own` where a rank sees a part of
every sequence, `compute` where it holds a part of the experts.

    x ──► router ──► choice, weights          choice == experts: dropped, beyond the capacity
    x ──► rows in order of their expert ──► experts ──► back to their tokens, weighted sum
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config import ModelConfig


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp, bias=False)
        self.up = nn.Linear(config.width, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class MixtureOfExperts(nn.Module):
    """Several MLPs, of which each token passes `top_k` (Shazeer et al. 2017, arXiv:1701.06538)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        choice, weights = self.router(x)
        out: Tensor = self.experts(x, choice, weights)
        return out


class Router(nn.Module):
    """Which experts see a token, and what each counts; scores and softmax never in 16 bits.

    A chosen expert counts its probability among all experts, not rescaled to sum to 1, so that the
    router learns with top_k = 1 too (Fedus et al. 2021, arXiv:2101.03961, section 2.1).

    Capacity c > 0 gives every expert ceil(c x top_k x T / experts) places in every sample of T
    tokens. They go to the sample's choices in order of position, then of preference; a choice that
    finds no place is dropped: the expert adds nothing to that token, its other choices count as
    before. So what is dropped depends neither on the batch around a sample nor on later tokens.

    Balance w > 0 adds to the loss, for each layer, w x the mean over samples of

        experts x sum_e  (choices of e / (top_k x T)) x (mean probability of e over T)

    which is 1 where the load is even: the loss of a sequence (DeepSeek-V3, arXiv:2412.19437,
    equations 17 to 20; over a batch: arXiv:2101.03961, equation 4). A sample's choices are counted
    before any is dropped, and no gradient runs through a count: so the loss is linear in the
    probabilities, and its gradient is the same however samples and positions are shared out.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.width).normal_(0.0, 0.02))
        self.number = config.experts
        self.top_k = config.top_k
        self.capacity = config.capacity
        self.balance = config.balance
        self.share = 1.0
        """What one sample's balance counts in the loss: 1 / samples."""
        self.scale = 1.0
        """What the loss is multiplied by before backward (float16 has a loss scale)."""
        self.adjust: Callable[[Tensor], Tensor] = as_scored
        """What is done to the scores: the seam for noise, a bias, or a fault."""
        self.load: Tensor | None = None
        """(experts + 1,) choices of each expert, then dropped ones, in training, since whoever
        reads it last took it away. What backward computes again counts again: read it as shares."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, sequence, width) to the choice and its weights, both (batch, sequence, top_k).

        Experts are numbers, int64; a dropped choice is the number `experts`.
        """
        probabilities = self.adjust(self.score(x)).softmax(dim=-1)
        order = probabilities.detach().argsort(dim=-1, descending=True, stable=True)
        choice = order[..., : self.top_k]  # of equal ones the first, on every device
        kept = choice
        if self.capacity or self.balance:
            whole = self.gather(choice)
            length = whole.shape[1]
            counts = count(whole.flatten(1), self.number)
            if self.balance:
                slope = self.balance * self.number / (self.top_k * length**2)
                slope *= self.share * self.scale
                push = counts.to(probabilities.dtype)[:, None] * slope
                probabilities = _Push.apply(probabilities, push)
            if self.capacity:
                places = queue_places(whole.flatten(1), self.number).view_as(whole)
                full = self.keep_own(places) >= self.slots(length)
                kept = choice.masked_fill(full, self.number)
        if self.training:
            self._note(choice, kept)
        return kept, probabilities.gather(-1, choice)

    def score(self, x: Tensor) -> Tensor:
        """(..., width) to (..., experts), float32 or float64, whatever autocast says."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.weight.to(wide))

    def slots(self, length: int) -> int:
        """Tokens that an expert takes from a sample of `length`."""
        return math.ceil(self.capacity * self.top_k * length / self.number)

    def gather(self, choice: Tensor) -> Tensor:
        """The choice at all positions of the samples, in their order."""
        return choice

    def keep_own(self, whole: Tensor) -> Tensor:
        """Of values at all positions, those of the positions that this module sees."""
        return whole

    def _note(self, choice: Tensor, kept: Tensor) -> None:
        dropped = (kept == self.number).sum()[None]
        load = torch.cat((count(choice.flatten(), self.number), dropped))
        self.load = load if self.load is None else self.load + load


class Experts(nn.ModuleDict):
    """The experts by number; those that are absent are held elsewhere."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__({str(number): MLP(config) for number in range(config.experts)})
        self.number = config.experts

    def forward(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """x (batch, sequence, width) through the experts that the router chose."""
        chosen = choice.flatten()
        sizes = count(chosen, self.number + 1)[: self.number].tolist()
        order = chosen.argsort(stable=True)[: sum(sizes)]
        rows = x.flatten(0, -2)[order // choice.shape[-1]]
        if torch.is_autocast_enabled(x.device.type):  # the experts' products would do the same
            rows = rows.to(torch.get_autocast_dtype(x.device.type))
        out = self.compute(rows, sizes)
        spread = out.new_zeros(len(chosen), x.shape[-1]).index_copy(0, order, out)
        mixed = spread.view(*choice.shape, -1) * weights[..., None]
        return mixed.sum(dim=-2).to(x.dtype)

    def compute(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """Rows (n, width), the first `sizes[0]` for the first expert and so on, to their outputs.

        An expert without rows runs too: its gradient, 0, is then there for those who wait for it.
        """
        parts = torch.split(rows, sizes)
        return torch.cat([expert(part) for expert, part in zip(self.values(), parts, strict=True)])


class _Push(torch.autograd.Function):
    """Adds `push` to the gradient: that of a loss linear in x, which need not be carried along."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, push: Tensor) -> Tensor:
        ctx.save_for_backward(push)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (push,) = ctx.saved_tensors
        return grad + push, None


def as_scored(scores: Tensor) -> Tensor:
    """Scores as they are."""
    return scores


def count(numbers: Tensor, kinds: int) -> Tensor:
    """(..., n) of 0 .. kinds - 1 to (..., kinds): how often each occurs; never waits for a GPU."""
    found = numbers.new_zeros(*numbers.shape[:-1], kinds)
    return found.scatter_add(-1, numbers, torch.ones_like(numbers))


def queue_places(numbers: Tensor, kinds: int) -> Tensor:
    """(batch, n) of 0 .. kinds - 1: how many earlier ones of the same row are the same."""
    order = numbers.argsort(dim=-1, stable=True)
    counts = count(numbers, kinds)
    starts = counts.cumsum(dim=-1) - counts
    at = torch.arange(numbers.shape[-1], device=numbers.device)
    places = at - starts.gather(-1, numbers.gather(-1, order))
    return torch.empty_like(numbers).scatter(-1, order, places)
