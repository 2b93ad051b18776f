"""The best layout as a file that others read: plan.yaml, configs of the trainer and its peers.

In: a Job and a Candidate that fits. Out: text; a UsageError where the trainer cannot have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from diag.commands import _output

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.planner.candidate import Candidate, Job


def plan_yaml(job: Job, one: Candidate) -> str:
    """What `diag topo --plan` takes."""
    import yaml

    cluster = job.cluster
    raw: dict[str, Any] = {
        "world": cluster.count,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "order": ["pp", "dp", "cp", "tp"],
        "tp": one.tp,
        "cp": one.cp,
        "pp": one.pp,
        "dp": one.dp,
        "ep": one.ep,
        "rank_to_gpu": "identity",
    }
    text: str = yaml.safe_dump(raw, sort_keys=False, default_flow_style=None)
    return text


def trainer_toml(job: Job, one: Candidate) -> str:
    """A config of `trainer/`, checked by the trainer's own rules."""
    from trainer.layout import problems

    sections = _sections(job, one)
    config = _config(sections)
    wrong = [*_unlike(job), *problems(config, job.cluster.count)]
    if wrong:
        raise click.UsageError(f"the trainer cannot have this layout: {'; '.join(wrong)}")
    lines = [f"# {one} on {job.cluster.count} {job.cluster.gpu.name}", ""]
    for name, values in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_literal(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _sections(job: Job, one: Candidate) -> dict[str, dict[str, Any]]:
    shape = job.shape
    model: dict[str, Any] = {
        "vocabulary": shape.vocabulary,
        "layers": shape.layers,
        "width": shape.width,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "mlp": shape.expert_mlp or shape.mlp,
    }
    if shape.experts:
        model |= {"experts": shape.experts, "top_k": shape.top_k}
    dtype = {2: "bfloat16", 4: "float32", 8: "float64"}[job.numbers.compute]
    parallel: dict[str, Any] = {
        "dp": one.dp,
        "zero": one.zero,
        "tp": one.tp,
        "sp": one.sp,
        "pp": one.pp,
        "schedule": one.schedule,
        "virtual": one.virtual,
        "cp": one.cp,
        "cp_form": one.cp_form,
        "ep": one.ep,
    }
    return {
        "model": model,
        "train": {
            "global_batch": job.global_batch,
            "microbatch": one.microbatch,
            "sequence": job.sequence,
            "dtype": dtype,
        },
        "parallel": parallel,
        "memory": {"checkpoint": [one.checkpointing]},
    }


def _config(sections: dict[str, dict[str, Any]]) -> Any:
    from trainer.config import Config, MemoryConfig, ModelConfig, ParallelConfig, TrainConfig

    return Config(
        model=ModelConfig(**sections["model"]),
        train=TrainConfig(**sections["train"]),
        parallel=ParallelConfig(**sections["parallel"]),
        memory=MemoryConfig(checkpoint=tuple(sections["memory"]["checkpoint"])),
    )


def _unlike(job: Job) -> list[str]:
    """Why the trainer's transformer is another one than this."""
    shape = job.shape
    found = []
    if shape.latent:
        found.append("it has no latent attention")
    if shape.matrices != 3 or shape.biases or shape.query_biases or shape.positions or shape.tied:
        found.append("its MLP is gated, it has no biases, learned positions or tied embeddings")
    if shape.shared_mlp or shape.dense_layers:
        found.append("its experts are in every layer, and none is shared")
    if shape.head and shape.head * shape.heads != shape.width:
        found.append("its heads divide the width")
    return found


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def megatron_args(job: Job, one: Candidate) -> str:
    """Arguments of Megatron-LM's pretrain_gpt.py, one a line, as `$(cat FILE)` takes them."""
    shape = job.shape
    if shape.latent:
        raise click.UsageError("Megatron arguments are not written for latent attention")
    words = [
        f"--num-layers {shape.layers}",
        f"--hidden-size {shape.width}",
        f"--ffn-hidden-size {shape.mlp}",
        f"--num-attention-heads {shape.heads}",
        f"--seq-length {job.sequence}",
        f"--max-position-embeddings {max(job.sequence, shape.positions)}",
        f"--micro-batch-size {one.microbatch}",
        f"--global-batch-size {job.global_batch}",
        f"--tensor-model-parallel-size {one.tp}",
        f"--pipeline-model-parallel-size {one.pp}",
        f"--context-parallel-size {one.cp}",
    ]
    if shape.kv_heads != shape.heads:
        words += ["--group-query-attention", f"--num-query-groups {shape.kv_heads}"]
    if shape.matrices == 3:
        words += ["--swiglu", "--normalization RMSNorm", "--position-embedding-type rope"]
    words += [] if shape.biases else ["--disable-bias-linear"]
    words += [] if shape.tied else ["--untie-embeddings-and-output-weights"]
    if shape.experts:
        words += [
            f"--num-experts {shape.experts}",
            f"--moe-router-topk {shape.top_k}",
            f"--moe-ffn-hidden-size {shape.expert_mlp}",
            f"--expert-model-parallel-size {one.ep}",
        ]
    if one.virtual > 1:
        if shape.layers % (one.pp * one.virtual):
            raise click.UsageError(
                f"Megatron's virtual stages are equal, and {one.pp} x {one.virtual} do not divide "
                f"{shape.layers} layers (--fix virtual=1)"
            )
        each = shape.layers // (one.pp * one.virtual)
        words.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    words += ["--sequence-parallel"] if one.sp else []
    words += _MEGATRON_ZERO[one.zero] + _MEGATRON_KEPT[one.checkpointing]
    words += {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(
        job.numbers.name, []
    )
    return "\n".join(words)


_MEGATRON_ZERO: dict[int, list[str]] = {
    0: [],
    1: ["--use-distributed-optimizer"],
    2: ["--use-distributed-optimizer", "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads"],
    3: ["--use-distributed-optimizer", "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params"],
}  # fmt: skip
_MEGATRON_KEPT: dict[str, list[str]] = {
    "none": [],
    "selective": ["--recompute-granularity selective"],
    "full": ["--recompute-granularity full", "--recompute-method uniform",
             "--recompute-num-layers 1"],
}  # fmt: skip


def deepspeed_json(job: Job, one: Candidate) -> str:
    """A DeepSpeed configuration; it knows batch, precision and ZeRO, so no other axis may be on."""
    if one.tp * one.pp * one.cp * one.ep > 1:
        raise click.UsageError(
            f"a DeepSpeed configuration has no tp, pp, cp or ep, and the best layout is {one} "
            f"(--fix 'tp=1 pp=1 cp=1 ep=1')"
        )
    raw: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": one.microbatch,
        "gradient_accumulation_steps": one.microbatches(job),
        "zero_optimization": {"stage": one.zero, "overlap_comm": True},
        "gradient_clipping": 1.0,
    }
    if job.numbers.name in {"bf16", "fp16"}:
        raw[job.numbers.name] = {"enabled": True}
    return _output.as_text(raw)


FORMS: dict[str, Callable[[Job, Candidate], str]] = {
    "plan": plan_yaml,
    "trainer": trainer_toml,
    "megatron": megatron_args,
    "deepspeed": deepspeed_json,
}
"""What --write may name."""
WRITERS: dict[str, Callable[[Job, Candidate], str]] = {
    ".yaml": plan_yaml,
    ".yml": plan_yaml,
    ".toml": trainer_toml,
}
"""By the ending of -o FILE."""
