"""A model from what people have: a preset's name, a HF config.json, or the trainer's own config.

In: mappings already parsed, or a Config. Out: a Shape, or ShapeError with every reason at once. It
opens nothing. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.planner.candidate import NUMBERS, Candidate
from trainer.planner.shape import Latent, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config import Config
    from trainer.planner.candidate import Numbers

_MOST = 1 << 24
"""No size of a model is larger."""
_PLAIN = {"gpt2", "gpt_neox", "gpt_bigcode", "opt", "gptj"}
"""Kinds with LayerNorm, biases and an MLP of two matrices."""


class ShapeError(ValueError):
    """A model that cannot be told; the message lists all reasons, one a line."""


def from_hf(raw: Mapping[str, Any], name: str) -> Shape:
    """A Shape from a HF config.json (Llama, Mistral, Qwen, Mixtral, DeepSeek, GPT-2 and like)."""
    wrong: list[str] = []
    kind = str(raw.get("model_type", ""))

    def size(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = raw.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
                wrong.append(f"{key}={value!r} is no size")
                return 1
            return value
        if default is None:
            wrong.append(f"{' or '.join(keys)} is missing")
            return 1
        return default

    width, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    plain = kind in _PLAIN
    experts = size("num_local_experts", "num_experts", "n_routed_experts", default=0)
    mlp = size("intermediate_size", "n_inner", default=4 * width if plain else None)
    one_expert = size("moe_intermediate_size", default=mlp) if experts else 0
    latent = _latent(size) if raw.get("kv_lora_rank") else None
    shape = Shape(
        name=name,
        layers=size("num_hidden_layers", "n_layer"),
        width=width,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        mlp=mlp,
        vocabulary=size("vocab_size"),
        head=size("head_dim", default=0) if latent is None else 0,
        matrices=2 if plain else 3,
        norm=2 if plain else 1,
        biases=plain,
        query_biases=kind in {"qwen2", "qwen2_moe"} or bool(raw.get("attention_bias", False)),
        tied=bool(raw.get("tie_word_embeddings", kind == "gpt2")),
        positions=size("n_positions", default=0) if kind == "gpt2" else 0,
        dropout=any(bool(raw.get(key)) for key in ("resid_pdrop", "hidden_dropout")),
        experts=experts,
        top_k=size("num_experts_per_tok", "num_experts_per_token") if experts else 0,
        expert_mlp=one_expert,
        shared_mlp=one_expert * size("n_shared_experts", default=0)
        or size("shared_expert_intermediate_size", default=0),
        dense_layers=size("first_k_dense_replace", default=0) if experts else 0,
        router_bias=raw.get("topk_method") == "noaux_tc",
        latent=latent,
    )
    return _checked(shape, wrong, name)


def from_trainer(config: Config, name: str) -> tuple[Shape, Numbers, Candidate]:
    """The model, the numbers' sizes and the layout (dp 0: what is left) of a trainer's config."""
    model, parallel = config.model, config.parallel
    if model.file:
        raise ShapeError(f"{name}: model.file={model.file} is a program; the planner needs sizes")
    wrong = [
        f"memory.checkpoint={','.join(config.memory.checkpoint)}: only one word of none, selective "
        f"and full is planned"
        for words in (config.memory.checkpoint,)
        if len(words) > 1 or words[0] not in {"none", "selective", "full"}
    ]
    shape = Shape(
        name=name,
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        mlp=model.mlp,
        vocabulary=model.vocabulary,
        norm=1 if model.norm == "rmsnorm" else 2,
        dropout=model.dropout > 0,
        experts=model.experts,
        top_k=model.top_k if model.experts else 0,
        expert_mlp=model.mlp if model.experts else 0,
    )
    numbers = {"float64": "trainer-fp64", "float32": "trainer-fp32"}.get(config.train.dtype)
    candidate = Candidate(
        dp=parallel.dp,
        zero=parallel.zero,
        tp=parallel.tp,
        sp=parallel.sp,
        pp=parallel.pp,
        virtual=parallel.virtual,
        schedule=parallel.schedule,
        cp=parallel.cp,
        cp_form=parallel.cp_form,
        ep=parallel.ep,
        microbatch=config.train.microbatch,
        checkpointing=config.memory.checkpoint[0],
    )
    return _checked(shape, wrong, name), NUMBERS[numbers or "trainer-bf16"], candidate


def _latent(size: Any) -> Latent:
    return Latent(
        query_rank=size("q_lora_rank"),
        key_rank=size("kv_lora_rank"),
        plain=size("qk_nope_head_dim"),
        rotary=size("qk_rope_head_dim"),
        value=size("v_head_dim"),
    )


def _checked(shape: Shape, wrong: list[str], name: str) -> Shape:
    sizes = {
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "vocabulary": shape.vocabulary,
    }
    if not wrong:
        wrong += [f"{key} is 0" for key, value in sizes.items() if value < 1]
        wrong += ["more than 4096 layers"] if shape.layers > 4096 else []
    if not wrong and shape.width % shape.heads and not (shape.head or shape.latent):
        wrong.append(f"{shape.heads} heads do not divide a width of {shape.width}")
    if wrong:
        raise ShapeError("\n".join(f"{name}: {one}" for one in wrong))
    return shape
