"""Sizes of model, layout and batch, from configuration files and from arguments that jobs print.

In: lines of TOML, YAML, JSON, `--flag value`, `Namespace(...)`, `name=value`. Out: config.value
events {name, value, section, key} in one vocabulary (heads, tp, global_batch, ...). Only the first
lines of a file are asked: what a job is configured to do stands at its begin.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import number

LINES = 20_000
_NAMES = {
    "heads": "num_attention_heads n_heads num_heads heads n_head attention_heads",
    "kv_heads": "num_key_value_heads n_kv_heads kv_heads num_query_groups",
    "layers": "num_layers num_hidden_layers n_layers layers n_layer",
    "experts": "num_experts n_experts num_local_experts n_routed_experts",
    "hidden": "hidden_size dim d_model n_embd",
    "vocab": "vocab_size padded_vocab_size vocab",
    "tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp tp_size "
    "tp_degree parallel.tensor",
    "pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp pp_size "
    "pp_degree parallel.pipeline",
    "cp": "context_parallel_size context_parallel_degree cp cp_size parallel.context",
    "ep": "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep ep_size "
    "parallel.expert",
    "dp": "data_parallel_size data_parallel_degree dp dp_size parallel.data",
    "world": "world_size",
    "micro_batch": "micro_batch_size micro_batch train_micro_batch_size_per_gpu "
    "per_device_train_batch_size",
    "global_batch": "global_batch_size global_batch train_batch_size",
    "accumulation": "gradient_accumulation_steps grad_accum accumulation",
    "aux_coefficient": "moe_aux_loss_coeff aux_loss_coef aux_loss_coeff router_aux_loss_coef "
    "load_balance_coeff load_balancing_loss_weight moe_aux_loss_weight moe_loss_coeff "
    "aux_loss_alpha "
    "aux_loss_weight balance_coefficient balance_loss_weight",
    "expert_bias": "moe_router_enable_expert_bias moe_expert_bias expert_bias",
    "router_topk": "moe_router_topk num_experts_per_tok top_k topk moe_top_k",
}
_KEYS = {key: name for name, keys in _NAMES.items() for key in keys.split()}
_PAIR = re.compile(
    r"(?<![\w.])(?:--)?\"?([A-Za-z][\w-]{0,60})\"?(\s{0,9}=\s{0,9}|:\s{0,9}|\s{1,9})\"?(-?\d[\d_.eE+-]*|[Tt]rue|[Ff]alse)"
    r"(?=[\"\s,;)}\]]|$)"
)
_SECTION = re.compile(r"^\s*(?:\[([\w.]+)\]\s*$|([A-Za-z_]\w*):\s*$)")
_WHOLE = re.compile(r"^\s*(?:--)?\"?[A-Za-z][\w.-]*\"?\s*[=:]\s*\S+?,?\s*(?:#.*)?$")


class Values:
    """Values of one file."""

    def __init__(self) -> None:
        self.lines = 0
        self.section = ""
        self.seen: set[tuple[str, float]] = set()

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Fields of every size that this line sets for the first time."""
        self.lines += 1
        if self.lines > LINES:
            return []
        found = _SECTION.match(text)
        if found:
            self.section = (found.group(1) or found.group(2) or "").lower()
            return []
        if "=" not in text and ":" not in text and "--" not in text:
            return []
        out = []
        for key, link, value in _PAIR.findall(text):
            one = self._one(text, key, link, value)
            if one is not None:
                out.append(one)
        return out

    def _one(self, text: str, key: str, link: str, value: str) -> dict[str, Any] | None:
        plain = key.lower().replace("-", "_")
        inside = "parallel" if "parallel" in self.section else self.section
        name = _KEYS.get(f"{inside}.{plain}") or _KEYS.get(plain)
        if name is None:
            return None
        if not link.strip() and f"--{key}" not in text:
            return None  # "heads 28" in a sentence sets nothing
        if ":" in link and len(plain) < 7 and not _WHOLE.match(text):
            return None  # "ep: 3" in a progress line is an epoch
        truth = {"true": 1.0, "false": 0.0}.get(value.lower())
        amount = truth if truth is not None else number(value.replace("_", ""))
        if amount is None or (name, amount) in self.seen:
            return None
        self.seen.add((name, amount))
        return {"name": name, "value": amount, "key": key, "section": self.section}
