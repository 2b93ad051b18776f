"""Model FLOPs utilisation: what a step has to compute, over what the GPUs could have computed.

In: the model's sizes, and what a step looked at; a GPU's name and the dtype of products.
Numerator: 6 x elements of matrices x positions + 12 x layers x width x visible pairs. A matrix of n
elements costs 2 n a position forward; scores and their product with values cost 2 x 2 x width a
layer and pair of a position and one that it sees, which is what causality and documents leave of
the square; backward costs twice forward. Of experts the router and top_k a position count, dropped
or not. Nothing for lookups, norms, softmax, padding or what is
computed again (Chowdhery et al. 2022, arXiv:2204.02311, app. B, which counts whole squares).
Denominator: seconds x ranks x dense peak of the GPU for the dtype; unknown for other GPUs and CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_TERA = 1e12
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"half": 2250, "float32": 75, "float64": 37}),
    ("GH200", {"half": 989.5, "float32": 67, "float64": 67}),
    ("H200", {"half": 989.5, "float32": 67, "float64": 67}),
    ("H100 PCIE", {"half": 756, "float32": 51, "float64": 51}),
    ("H100 NVL", {"half": 835, "float32": 60, "float64": 60}),
    ("H100", {"half": 989.5, "float32": 67, "float64": 67}),
    ("A100", {"half": 312, "float32": 19.5, "float64": 19.5}),
    ("L40S", {"half": 362, "float32": 91.6}),
)
"""Dense TFLOP/s by what a name contains, first match, from NVIDIA's data sheets; float32 without
TF32, which is torch's default."""


def of_step(model: ModelConfig, positions: int, pairs: int) -> float | None:
    """The numerator, in FLOPs of all ranks together; None where a model.file says no sizes.

    `pairs` are (position, visible position) of all samples, as attention of one layer sees them.
    """
    if model.file:
        return None
    keys = model.width // model.heads * model.kv_heads
    attention = 2 * model.width * (model.width + keys)
    mlp = 3 * model.width * model.mlp
    if model.experts:
        mlp = mlp * model.top_k + model.width * model.experts
    matrices = model.layers * (attention + mlp) + model.width * model.vocabulary
    return 6.0 * matrices * positions + 12.0 * model.layers * model.width * pairs


def peak(gpu: str, dtype: str) -> float | None:
    """FLOP/s of one whole GPU of this name; None where unknown, and for a share of one (MIG)."""
    kind = "half" if dtype in {"bfloat16", "float16"} else dtype
    name = gpu.upper()
    if "MIG" in name:
        return None
    for part, rates in _PEAKS:
        if part in name:
            return rates[kind] * _TERA if kind in rates else None
    return None
