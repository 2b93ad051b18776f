"""`diag plan`: which parallel layouts fit a model and a cluster, and how fast they would be.

In: a model (a preset, a HF config.json, the trainer's TOML), GPUs, sequence and batch. Out:
`diag.plan/1` as text, JSON, markdown or HTML; `-o` with .yaml or .toml, or `--write`, gives the
best layout as plan.yaml or as the config of the trainer, Megatron or DeepSpeed. Exit codes: 0,
1 nothing fits, 2 cannot be asked so.
"""

from __future__ import annotations

from pathlib import Path

import click

from diag.commands import _output, _plan_inputs


@click.command("plan")
@click.option("--model", required=True, metavar="NAME|FILE", help="preset, config.json or .toml")
@click.option("--gpus", type=int, metavar="N", help="how many GPUs there are")
@click.option("--gpu", metavar="KIND", help="h100, h200, a100, b200, l40s, v100, ...")
@click.option("--gpus-per-node", "per_node", type=click.IntRange(1, 1024), help="default: 8")
@click.option(
    "--topology",
    metavar="FILE",
    type=click.Path(exists=True),
    help="a node's topology, whose links count instead of the data sheet's",
)
@click.option("--seq", "sequence", type=click.IntRange(1, 1 << 26), help="tokens a sample")
@click.option("--global-batch", "batch", type=click.IntRange(1, 1 << 26), help="samples a step")
@click.option(
    "--dtype",
    type=click.Choice(("bf16", "bfloat16", "fp16", "float16", "fp8", "float8", "fp32", "float32")),
    help="arithmetic; default: bf16, or what the trainer's TOML says",
)
@click.option("--fix", multiple=True, metavar="'tp=8 pp=4'", help="keep to these axes")
@click.option("--top", type=click.IntRange(1, 1000), default=5, show_default=True, help="layouts")
@click.option(
    "--write",
    type=click.Choice(("plan", "trainer", "megatron", "deepspeed")),
    help="what -o FILE gets of the best layout; by itself .yaml: plan, .toml: trainer",
)
@click.option("--explain", is_flag=True, help="each number of the best layout with its formula")
@click.option("--ladder", is_flag=True, help="the way to the best layout, one change at a time")
@_output.options
def command(
    model: str,
    gpus: int | None,
    gpu: str | None,
    per_node: int | None,
    topology: str | None,
    sequence: int | None,
    batch: int | None,
    dtype: str | None,
    fix: tuple[str, ...],
    top: int,
    write: str | None,
    explain: bool,
    ladder: bool,
    form: str,
    output: str | None,
) -> int:
    """Rank the layouts that fit, before launch; each reject with its reasons."""
    if write and not output:
        raise click.UsageError(f"--write {write} needs -o FILE")
    asked = _plan_inputs.Asked(model, gpus, gpu, per_node, topology, sequence, batch, dtype, fix)
    job, fixed = _plan_inputs.job_of(asked)
    from diag.commands import _plan_files, _plan_view
    from trainer.planner.explain import explain as formulas
    from trainer.planner.ladder import ladder as rungs
    from trainer.planner.search import search

    view = _plan_view.View(search(job, fixed), top)
    best = view.search.ranked[0].candidate if view.search.ranked else None
    if best and explain:
        view.formulas = formulas(job, best)
    if best and ladder:
        view.rungs = rungs(job, best)
    writer = _plan_files.FORMS[write] if write else None
    if output and writer is None:
        writer = _plan_files.WRITERS.get(Path(output).suffix)
    _output.write(_plan_view.render(view, form), None if writer else output)
    if writer is not None and best is not None:
        _output.write(writer(job, best), output)
    return 0 if best else 1
