"""A backward in two halves: first what the stage before waits for, later what nobody waits for.

In: the parts of this rank's stages. Out: `input_gradient`, which leaves the gradient on the stage's
input, and `weight_gradient`, which adds those of the parameters: only there does any `.grad`
change and any hook see it, so that buckets and shards need not know of halves.
Nothing is computed twice: a linear layer's backward makes the first of its two products and keeps
what the second needs (as Qi et al. 2024, arXiv:2401.10241, do); all else that parameters need
(norms, the embedding) is cheap, made in the first half and delivered in the second.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (what everybody calls it)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Key = tuple[int, int]
    """Stage and microbatch."""
    Product = tuple[nn.Parameter, Tensor, Tensor]
    """A weight, the input that it met, and the gradient of what came out."""


class _Owed:
    """What the first halves leave to the second ones."""

    def __init__(self, device: torch.device) -> None:
        self.products: list[Product] = []
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """An input of every linear layer: who asks for its gradient reaches them all, also those
        that no other gradient has to pass. It stays 0."""


class _FirstProduct(torch.autograd.Function):
    """A linear layer whose backward gives the gradient of its input and owes that of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, owed: _Owed, anchor: Tensor) -> Tensor:  # noqa: ARG004 (see _Owed)
        ctx.owed, ctx.owner = owed, weight
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.owed.products.append((ctx.owner, x, grad))
        slope = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return slope, None, None, None


class _OwingLinear(nn.Linear):
    """A linear layer that pays its weight's gradient later."""

    owed: _Owed

    def forward(self, x: Tensor) -> Tensor:
        """As nn.Linear."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        out: Tensor = _FirstProduct.apply(x, self.weight, self.owed, self.owed.anchor)
        return out if self.bias is None else out + self.bias


class Halves:
    """The backwards of one rank's stages; linear layers of `stages` change their class."""

    def __init__(self, stages: Mapping[int, Iterable[nn.Module]], device: torch.device) -> None:
        self._owed = _Owed(device)
        self._rest: dict[int, list[nn.Parameter]] = {}
        """Parameters whose gradient, or the part of it that is no product, is made first."""
        self._products: dict[Key, list[Product]] = {}
        self._made: dict[Key, list[tuple[nn.Parameter, Tensor]]] = {}
        for stage, parts in stages.items():
            rest: dict[nn.Parameter, None] = {}
            for module in (m for part in parts for m in part.modules()):
                own = dict(module.named_parameters(recurse=False))
                if type(module) is nn.Linear:
                    module.__class__ = _OwingLinear
                    module.owed = self._owed  # type: ignore[assignment]  # torch types attributes
                    del own["weight"]
                rest |= dict.fromkeys(own.values())
            self._rest[stage] = list(rest)

    def input_gradient(self, key: Key, out: Tensor, gradient: Tensor | None, x: Tensor) -> None:
        """The first half: `x.grad`, where `x` asks for one; `key` names what is owed then."""
        rest = self._rest[key[0]]
        asked = [x] if x.requires_grad else []
        wanted = [self._owed.anchor, *rest, *asked]
        _, *made = torch.autograd.grad(out, wanted, gradient, allow_unused=True)
        if asked:
            x.grad = made.pop()
        self._products[key], self._owed.products = self._owed.products, []
        self._made[key] = [
            (p, grad) for p, grad in zip(rest, made, strict=True) if grad is not None
        ]

    def weight_gradient(self, key: Key) -> None:
        """The second half: add to every parameter's gradient, once each, last layers first.

        Once each, since hooks count: who uses a parameter twice waits for its other gradient.
        """
        made, products = self._made.pop(key)[::-1], self._products.pop(key)
        missing = Counter([p for p, _ in made] + [weight for weight, _, _ in products])
        sums: dict[nn.Parameter, Tensor] = {}

        def deliver(p: nn.Parameter, grad: Tensor) -> None:
            missing[p] -= 1
            grad = grad if p not in sums else sums.pop(p) + grad
            if missing[p]:
                sums[p] = grad
            else:
                torch.autograd.backward(p, grad)

        for p, grad in made:
            deliver(p, grad)
        for weight, x, grad in products:
            deliver(weight, (grad.flatten(0, -2).T @ x.flatten(0, -2)).to(weight.dtype))
