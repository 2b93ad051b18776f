"""The best layout as a file that something else reads: plan.yaml, or the trainer's config.

In: a Job and a Candidate that fits. Out: text; a UsageError where the trainer cannot have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

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


WRITERS: dict[str, Callable[[Job, Candidate], str]] = {
    ".yaml": plan_yaml,
    ".yml": plan_yaml,
    ".toml": trainer_toml,
}
"""By the ending of -o FILE."""
