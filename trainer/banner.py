"""What a run says of itself at the start: what is on, what is off, and why.

Pure: objects in, text out; `__main__` prints, on rank 0 only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer import rate, stages
from trainer.groups import divide, ep_is_far, rows
from trainer.layout import microbatches, resolve
from trainer.limits.faults import where
from trainer.parallel import drawing, schedule, timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config import Config, DataConfig, TrainConfig
    from trainer.loop import Trainer

_GRADIENTS = (
    "{} bucket(s) summed over dp during backward, once a step",
    "{} bucket(s) reduce-scattered over dp once a step; optimizer states shared (zero 1)",
    "{} bucket(s) reduce-scattered over dp in each backward; optimizer states shared (zero 2)",
    "{} layers gathered when needed, gradients reduce-scattered, states shared (zero 3)",
)
_HOST = {
    "none": "nothing: memory.offload=none",
    "optimizer": "optimizer states and the weights it updates; the update runs there",
    "parameters": "shares of parameters, optimizer states and the update; fetched when gathered",
}


def banner(trainer: Trainer, parameters: Sequence[int]) -> str:
    """What this run is; `parameters` are the elements that each rank holds, by rank."""
    config, layout, mesh = trainer.config, trainer.layout, trainer.mesh
    train = config.train
    count = microbatches(config, layout)
    corpus = trainer.loader.corpus
    source = config.data.path or "the standard library's sources"
    unit = "bytes" if config.data.dtype == "uint8" else f"{config.data.dtype} tokens"
    backend = "none" if mesh.world == 1 else {"cuda": "nccl"}.get(trainer.device.type, "gloo")
    fewest, most = (f"{one:,}" for one in (min(parameters), max(parameters)))
    held = fewest if fewest == most else f"{fewest} to {most}"
    told = [
        ("mesh", f"{mesh.describe()}, {mesh.world} rank(s)"),
        *((f"  {axis.name} groups", _groups(trainer, axis.name)) for axis in mesh.axes.values()),
        *([("  ep groups", _expert_groups(trainer))] if layout.ep > 1 else []),
        ("model", _model(trainer)),
        ("parameters", f"{trainer.built.whole:,} in all, {held} a rank"),
        (
            "batch",
            (
                f"{train.global_batch} samples of {train.sequence} tokens = "
                f"{train.global_batch * train.sequence:,} tokens a step, "
                f"{count} microbatch(es) of {train.microbatch} a rank"
            ),
        ),
        ("data", f"{source}: {corpus.size:,} {unit} in {len(corpus.shards):,} files"),
        ("documents", _documents(config.data)),
        ("evaluation", _evaluation(trainer)),
        ("device", f"{trainer.device.type}, {train.dtype}, backend {backend}"),
        *_switches(trainer),
    ]
    wide = max(len(name) for name, _ in told)
    return "\n".join(f"{name:<{wide}}  {text}" for name, text in told)


def schedule_drawn(config: Config, world: int) -> str:
    """The pipeline's schedule in characters, and what its lists foretell."""
    layout, parallel = resolve(config, world), config.parallel
    count = microbatches(config, layout)
    lists = schedule.make(parallel.schedule, layout.pp, count, parallel.virtual)
    costs, note = None, "equal stages"
    if not config.model.file and parallel.split != ("measured",):
        paths = [f"layers.{number}" for number in range(config.model.layers)]
        layers, costs = stages.told(config, paths, layout.pp * parallel.virtual)
        note = f"stages of {'+'.join(str(len(own)) for own in layers)} layers"
    flight = "+".join(map(str, timeline.in_flight(lists)))
    heading = f"{parallel.schedule}, {layout.pp} rank(s), {count} microbatches, {note}"
    ending = (
        f"predicted bubble {timeline.bubble(lists, costs):.1%} (F = I = W, B = 2 F; what is "
        f"recomputed costs F again), at most {flight} microbatches in flight by rank"
    )
    return "\n".join([heading, *drawing.draw(lists, costs), ending])


def _documents(data: DataConfig) -> str:
    ends = "its file" if data.end < 0 else f"its file or token {data.end}"
    sees = "sees its own only" if data.documents else "is not masked: data.documents=false"
    return f"a document ends with {ends}; attention {sees}"


def _evaluation(trainer: Trainer) -> str:
    settings, loader = trainer.config.eval, trainer.loader
    if not settings.every:
        return f"off: eval.every=0; {loader.trained:,} samples an epoch"
    return (
        f"{settings.batches * loader.global_batch:,} of {loader.held:,} held-out samples every "
        f"{settings.every} steps; {loader.trained:,} samples an epoch"
    )


def _rate(config: Config) -> str:
    optim = config.optim
    base = f" = {optim.lr:g} x {config.train.global_batch} / {optim.base_batch}"
    to = f" to {optim.lr_final:g} of it" if optim.schedule in {"linear", "cosine", "wsd"} else ""
    return (
        f"{optim.warmup} steps up to {rate.peak(config):g}{base if optim.base_batch else ''}, then "
        f"{optim.schedule}{to}"
    )


def _utilisation(trainer: Trainer) -> str:
    if trainer.config.model.file:
        return "not told: the FLOPs of a model.file are not known"
    if trainer.peak is None:
        return f"not told: the peak of this {trainer.device.type} in this dtype is not known"
    return f"of {trainer.peak / trainer.mesh.world / 1e12:g} dense TFLOP/s a rank, model FLOPs only"


def _groups(trainer: Trainer, name: str) -> str:
    """All groups of an axis: ranks that differ in that coordinate only."""
    axis = trainer.mesh[name]
    if axis.size == 1:
        return "off, size 1"
    return _spelled(rows(_sizes(trainer), (name,)))


def _expert_groups(trainer: Trainer) -> str:
    """The ranks that share the experts of a layer."""
    data = rows(_sizes(trainer), ("dp", "cp"))
    far = ep_is_far(trainer.config.mesh.order)
    return _spelled(divide(data, trainer.layout.ep, far=far)[0])


def _sizes(trainer: Trainer) -> dict[str, int]:
    return {name: axis.size for name, axis in trainer.mesh.axes.items()}


def _spelled(groups: list[list[int]]) -> str:
    return " ".join(str(group).replace(",", "") for group in groups)


def _model(trainer: Trainer) -> str:
    model = trainer.config.model
    layers = [len(own) for own in trainer.built.layers]
    how = {"even": "", "measured": ", measured"}.get(trainer.config.parallel.split[0], ", as told")
    split = f" ({'+'.join(map(str, layers))} by stage{how})" if len(layers) > 1 else ""
    if model.file:
        return model.file + split
    return (
        f"{model.layers} layers{split}, width {model.width}, {model.heads} heads over "
        f"{model.kv_heads} key/value heads, mlp {model.mlp}, {model.norm}"
    )


def _experts(trainer: Trainer) -> str:
    model, ep = trainer.config.model, trainer.layout.ep
    if model.file or not model.experts:
        return "none: every token passes the whole MLP"
    slots = f"at most {model.capacity:g}x their even share" if model.capacity else "dropless"
    return (
        f"{model.experts} a layer, {model.experts // ep} a rank over ep {ep}, "
        f"{trainer.mesh.expert_data.size} replica(s) of each; top {model.top_k} see a token, "
        f"{slots}, balance {model.balance:g}"
    )


def _switches(trainer: Trainer) -> list[tuple[str, str]]:
    """What is on, what is off, and why."""
    config, layout = trainer.config, trainer.layout
    buckets = len(trainer.built.buckets.buckets)
    clip, faults = config.optim.clip, config.faults
    return [
        (
            "gradients",
            _GRADIENTS[config.parallel.zero].format(buckets)
            if trainer.mesh.data.size > 1
            else "no sum over dp: one replica",
        ),
        ("experts", _experts(trainer)),
        (
            "vocabulary",
            f"{config.model.vocabulary:,} tokens; "
            + (
                f"embedding, head and loss split over tp {layout.tp}"
                if layout.tp > 1
                else "whole on every rank: tp is 1"
            ),
        ),
        (
            "attention",
            f"on {config.train.sequence // layout.cp} of {config.train.sequence} positions, keys "
            f"and values by {config.parallel.cp_form} over cp {layout.cp}"
            if layout.cp > 1
            else "on whole sequences: cp is 1",
        ),
        (
            "sequence",
            f"norms and residual stream on shards of the sequence over tp {layout.tp}"
            if config.parallel.sp
            else "whole on every rank: parallel.sp=false",
        ),
        (
            "schedule",
            f"{config.parallel.schedule}, {layout.pp * config.parallel.virtual} stages; predicted "
            f"bubble {trainer.predicted_bubble:.0%}, at most "
            f"{max(timeline.in_flight(trainer.built.schedules))} microbatches in flight on a rank"
            if layout.pp > 1
            else "forward then backward of each microbatch: one stage",
        ),
        (
            "activations",
            "kept from forward to backward: memory.checkpoint=none"
            if config.memory.checkpoint == ("none",)
            else f"recomputed in backward: {','.join(config.memory.checkpoint)}",
        ),
        (
            "dropout",
            f"{config.model.dropout:g}, the same elements under every layout"
            if config.model.dropout
            else "off: model.dropout=0",
        ),
        ("sharing", _sharing(trainer)),
        ("host memory", _HOST[config.memory.offload]),
        ("learning rate", _rate(config)),
        ("checkpoints", _checkpoints(config)),
        ("clipping", f"global norm {clip:g}" if clip else "off: optim.clip=0"),
        (
            "precision",
            f"{config.train.dtype} products, float32 weights (autocast)"
            if config.train.dtype in {"bfloat16", "float16"}
            else f"{config.train.dtype} throughout, no autocast",
        ),
        ("reductions", _reductions(config.train)),
        (
            "loss scale",
            f"{config.scale.initial:g}, x {config.scale.growth:g} after {config.scale.interval} "
            f"good steps, x {config.scale.backoff:g} and no update after an overflow"
            if trainer.scale.on
            else f"none: {config.train.dtype} has the range",
        ),
        ("mfu", _utilisation(trainer)),
        (
            "fault",
            "none"
            if faults.kind == "none"
            else f"{faults.kind} on {where(faults)} from step {faults.step}, on purpose",
        ),
    ]


def _sharing(trainer: Trainer) -> str:
    """Who shares with whom under ZeRO, and what is fetched early."""
    parallel, mesh = trainer.config.parallel, trainer.mesh
    if not parallel.zero:
        return "nothing: parallel.zero=0"
    held = f"over {mesh.shard.size} rank(s) of {mesh.data.size}"
    copies = (
        f"; {mesh.replica.size} replicas of each share, summed once a step"
        if mesh.replica.size > 1
        else ""
    )
    early = (
        f"; {parallel.prefetch} unit(s) gathered before they are needed"
        if parallel.zero == 3 and parallel.prefetch
        else ""
    )
    return held + copies + early


def _reductions(train: TrainConfig) -> str:
    """The dtype in which gradients are summed over replicas, and why that."""
    if train.reduce_dtype != "auto":
        return f"gradients summed over dp in {train.reduce_dtype}: train.reduce_dtype"
    if train.dtype in {"bfloat16", "float16"}:
        return "gradients summed over dp in float32: a sum in half precision would round"
    return f"gradients summed over dp in {train.dtype}, that of the weights"


def _checkpoints(config: Config) -> str:
    asked = config.checkpoint
    if not asked.folder:
        return "none: checkpoint.folder is empty"
    when = f"every {asked.every} steps and " if asked.every else ""
    how = "while training goes on" if asked.background else "while training waits"
    return f"{when}after the last step in {asked.folder}, {how}; the last {asked.keep} are kept"
