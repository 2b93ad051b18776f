"""What pipelines can't do: schedules, splits and checkpointing that do not fit the stages.

In: Config and Layout. Out: a line for each reason, with the flag that changes it. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.split import nearest

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.layout import Layout


def problems(config: Config, layout: Layout) -> list[str]:
    """Every reason why this layout cannot have these stages; another layout might."""
    return [*_count_problems(config, layout), *_schedule_problems(config, layout)]


def list_problems(config: Config, layout: Layout) -> list[str]:
    """Lists by stage that do not fit the stages of this layout; no other layout is the cure."""
    if _count_problems(config, layout):
        return []
    return [*_split_problems(config, layout), *_checkpoint_problems(config, layout)]


def stages_of(config: Config, layout: Layout) -> int:
    """Stages of the whole pipeline."""
    return layout.pp * config.parallel.virtual


def word_problems(config: Config) -> list[str]:
    """What no layout could mend: words that mean nothing."""
    found = []
    virtual, schedule = config.parallel.virtual, config.parallel.schedule
    if (schedule == "interleaved") != (virtual > 1):
        found.append(
            f"parallel.virtual={virtual} and parallel.schedule={schedule}: several "
            f"stages a rank are interleaved, and only they "
            f"(parallel.schedule=interleaved parallel.virtual=2, or parallel.virtual=1)"
        )
    split = config.parallel.split
    if split not in {("even",), ("measured",)} and not all(map(str.isdecimal, split)):
        found.append(
            f"parallel.split={','.join(split)} is not even, measured or layers by stage "
            f"(parallel.split=even, or such as parallel.split=1,2,1)"
        )
    for word in config.memory.checkpoint:
        count = word.removeprefix("every-")
        every = count != word and count.isdecimal() and int(count) > 0
        if word not in {"none", "full", "selective"} and not every:
            found.append(
                f"memory.checkpoint={word} is not none, full, selective or every-K "
                f"(memory.checkpoint=every-2)"
            )
    if config.memory.limit and split != ("measured",):
        found.append(
            f"memory.limit={config.memory.limit} is what a measured split keeps to, and "
            f"parallel.split={','.join(split)} (parallel.split=measured, or memory.limit=0)"
        )
    return found


def _count_problems(config: Config, layout: Layout) -> list[str]:
    """More stages than layers."""
    layers = config.model.layers
    stages = stages_of(config, layout)
    if config.model.file:  # its chain() knows; see blueprint.py
        return []
    if layout.pp > layers:
        return [
            (
                f"parallel.pp={layout.pp} stages exceed model.layers={layers} "
                f"(parallel.pp={layers} or model.layers={layout.pp})"
            )
        ]
    if stages > layers:
        return [
            (
                f"parallel.pp x parallel.virtual = {stages} stages exceed model.layers={layers} "
                f"(parallel.virtual={layers // layout.pp} or model.layers={stages})"
            )
        ]
    return []


def _split_problems(config: Config, layout: Layout) -> list[str]:
    """A list of layers by stage that does not fit."""
    if config.model.file:
        return []
    return split_problems(config.parallel.split, config.model.layers, stages_of(config, layout))


def split_problems(split: tuple[str, ...], layers: int, stages: int) -> list[str]:
    """Why a list of layers by stage does not fit so many layers and stages."""
    if not all(map(str.isdecimal, split)):
        return []
    counts = [int(one) for one in split]
    reasons = []
    if len(counts) != stages:
        reasons.append(f"names {len(counts)} stage(s), and there are {stages}")
    if sum(counts) != layers:
        reasons.append(f"has {sum(counts)} layers of {layers} (model.layers)")
    if 0 in counts:
        reasons.append("leaves a stage without a layer")
    if not reasons:
        return []
    fit = ",".join(map(str, nearest(counts, layers, stages)))
    return [f"parallel.split={','.join(split)} {' and '.join(reasons)} (parallel.split={fit})"]


def _checkpoint_problems(config: Config, layout: Layout) -> list[str]:
    """A list of words by stage that does not fit."""
    words, stages = config.memory.checkpoint, stages_of(config, layout)
    if len(words) in {1, stages}:
        return []
    fit = ",".join([*words, *[words[-1]] * stages][:stages])
    return [
        (
            f"memory.checkpoint={','.join(words)} names {len(words)} stages of {stages} "
            f"(memory.checkpoint={fit}, or one word for all)"
        )
    ]


def _schedule_problems(config: Config, layout: Layout) -> list[str]:
    """Whether the schedule can run on these stages and microbatches."""
    found: list[str] = []
    if config.parallel.schedule != "interleaved":
        return found
    if layout.pp == 1:
        found.append(
            "parallel.schedule=interleaved needs several ranks, and pp is 1 "
            "(parallel.pp=2, or parallel.schedule=1f1b parallel.virtual=1)"
        )
    train = config.train
    count = train.global_batch // (layout.dp * train.microbatch) if layout.dp else 0
    if count % layout.pp:
        wanted = -(-count // layout.pp) * layout.pp * layout.dp * train.microbatch
        found.append(
            f"parallel.schedule=interleaved takes microbatches in groups of pp = {layout.pp}, and "
            f"{count} are no multiple (train.global_batch={wanted})"
        )
    return found
