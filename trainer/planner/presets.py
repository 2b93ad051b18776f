"""Models by name, with the sizes that their authors published.

In: a name. Out: a Shape. The counts of parameters that follow are those of the published weights
(`tests/trainer/test_planner_shape.py`).
"""

from __future__ import annotations

from trainer.planner.shape import Latent, Shape

PRESETS: dict[str, Shape] = {
    one.name: one
    for one in (
        # Llama 2: arXiv:2307.09288
        Shape("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        Shape("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        # Llama 3: arXiv:2407.21783, table 3
        Shape("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        Shape("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        Shape("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        # GPT-3: arXiv:2005.14165, table 2.1
        Shape(
            "gpt3-175b",
            96,
            12288,
            96,
            96,
            4 * 12288,
            50257,
            matrices=2,
            norm=2,
            biases=True,
            tied=True,
            positions=2048,
            dropout=True,
        ),
        # Mixtral: arXiv:2401.04088, table 1
        Shape("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2, expert_mlp=14336),
        # DeepSeek-V3: arXiv:2412.19437, section 4.2; without its multi-token prediction layer
        Shape(
            "deepseek-v3",
            61,
            7168,
            128,
            128,
            18432,
            129280,
            experts=256,
            top_k=8,
            expert_mlp=2048,
            shared_mlp=2048,
            dense_layers=3,
            router_bias=True,
            latent=Latent(query_rank=1536, key_rank=512, plain=128, rotary=64, value=128),
        ),
    )
}

_ALIASES = {
    "llama3.1-405b": "llama3-405b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-8b": "llama3-8b",
}


def named(name: str) -> Shape | None:
    """The preset of this name, however it is spelled: `Llama 3 8B`, `llama-3-8b`."""
    plain = _plain(name)
    for key, shape in PRESETS.items():
        if _plain(key) == plain:
            return shape
    for key, target in _ALIASES.items():
        if _plain(key) == plain:
            return PRESETS[target]
    return None


def _plain(name: str) -> str:
    return "".join(one for one in name.lower() if one.isalnum() or one == ".")
