"""Which parallel layouts a model, a batch and a world allow; arithmetic only, no torch.

In: a Config and a world size. Out: the Layout with dp filled in, every reason why it cannot work,
and the nearest layouts that can. Every check names the flag that changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from trainer.config import AXES, VOCABULARY

if TYPE_CHECKING:
    from trainer.config import Config

_SHOWN = 3
"""Nearest layouts that an error names: enough to choose from, few enough to read."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes."""

    dp: int
    tp: int
    pp: int

    def size(self, axis: str) -> int:
        """Ranks along one axis."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp}[axis]

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp


def resolve(config: Config, world: int) -> Layout:
    """The layout asked for; dp=0 becomes what tp and pp leave of the world (0 if nothing fits)."""
    parallel = config.parallel
    dp = parallel.dp or world // (parallel.tp * parallel.pp)
    return Layout(dp=dp, tp=parallel.tp, pp=parallel.pp)


def microbatches(config: Config, layout: Layout) -> int:
    """Microbatches that each rank runs in a step."""
    return config.train.global_batch // (layout.dp * config.train.microbatch)


def stage_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage, as even as can be; where they do not divide, early stages are shorter.

    The last stage has the head and the loss and the first only a lookup, yet 1F1B keeps the most
    activations alive in the first: a layer less there saves memory where it is scarcest.
    """
    bounds = [layers * stage // stages for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def problems(config: Config, world: int) -> list[str]:
    """Every reason why this layout cannot work, and the nearest ones that can."""
    layout = resolve(config, world)
    found = [*_model_problems(config), *_layout_problems(config, layout, world)]
    if len(found) > len(_model_problems(config)):
        found.append(_nearest_line(config, layout, world))
    if sorted(config.mesh.order) != sorted(AXES):
        found.append(
            f"mesh.order={','.join(config.mesh.order)} must name each of {', '.join(AXES)} once "
            f"(mesh.order={','.join(AXES)})"
        )
    return found


def legal(config: Config, world: int) -> list[Layout]:
    """Every layout that this model, batch and world allow."""
    layouts = [
        Layout(dp=world // (tp * pp), tp=tp, pp=pp)
        for tp in _divisors(world)
        for pp in _divisors(world // tp)
    ]
    return [one for one in layouts if not _layout_problems(config, one, world)]


def _model_problems(config: Config) -> list[str]:
    model = config.model
    found = []
    if model.width % model.heads:
        found.append(
            f"model.width={model.width} is not a multiple of model.heads={model.heads} "
            f"(model.heads={_nearest(_divisors(model.width), model.heads)})"
        )
    elif model.width // model.heads % 2:
        found.append(
            f"a head is {model.width // model.heads} wide, rotary positions turn pairs: "
            f"it must be even (model.width={model.width + model.heads})"
        )
    if model.heads % model.kv_heads:
        found.append(
            f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads} "
            f"(model.kv_heads={_nearest(_divisors(model.heads), model.kv_heads)})"
        )
    virtual = config.parallel.virtual
    if (config.parallel.schedule == "interleaved") != (virtual > 1):
        found.append(
            f"parallel.virtual={virtual} and parallel.schedule={config.parallel.schedule}: several "
            f"stages a rank are interleaved, and only they "
            f"(parallel.schedule=interleaved parallel.virtual=2, or parallel.virtual=1)"
        )
    kind = config.memory.checkpoint
    count = kind.removeprefix("every-")
    if kind not in {"none", "full"} and not (kind != count and count.isdigit() and int(count) > 0):
        found.append(
            f"memory.checkpoint={kind} is not none, full or every-K (memory.checkpoint=every-2)"
        )
    return found


def _layout_problems(config: Config, layout: Layout, world: int) -> list[str]:
    model, train = config.model, config.train
    found = []
    if layout.world != world and not config.parallel.dp:
        shared = layout.tp * layout.pp
        found.append(
            f"tp x pp = {layout.tp} x {layout.pp} = {shared} does not divide {world} ranks "
            f"(parallel.tp, parallel.pp or --nproc-per-node)"
        )
    elif layout.world != world:
        found.append(
            f"dp x tp x pp = {layout.dp} x {layout.tp} x {layout.pp} = {layout.world}, but there "
            f"are {world} ranks (parallel.dp, parallel.tp, parallel.pp or --nproc-per-node)"
        )
    if layout.tp > model.kv_heads:
        found.append(
            f"parallel.tp={layout.tp} exceeds model.kv_heads={model.kv_heads}: each tp rank needs "
            f"a whole key/value head (parallel.tp={model.kv_heads} or model.kv_heads={layout.tp})"
        )
    split = (
        ("model.heads", model.heads),
        ("model.kv_heads", model.kv_heads),
        ("model.mlp", model.mlp),
        ("the vocabulary", VOCABULARY),
    )
    common = math.gcd(*(size for _, size in split))
    bad = [f"{name}={size}" for name, size in split if size % layout.tp]
    if bad and layout.tp <= model.kv_heads:
        found.append(
            f"parallel.tp={layout.tp} does not divide {', '.join(bad)} "
            f"(parallel.tp={_nearest(_divisors(common), layout.tp)})"
        )
    stages = layout.pp * config.parallel.virtual
    if layout.pp > model.layers:
        found.append(
            f"parallel.pp={layout.pp} stages exceed model.layers={model.layers} "
            f"(parallel.pp={model.layers} or model.layers={layout.pp})"
        )
    elif stages > model.layers:
        found.append(
            f"parallel.pp x parallel.virtual = {stages} stages exceed model.layers={model.layers} "
            f"(parallel.virtual={model.layers // layout.pp} or model.layers={stages})"
        )
    found += _schedule_problems(config, layout)
    found += _sequence_problems(config, layout)
    if config.parallel.zero and layout.dp == 1:
        found.append(
            f"parallel.zero={config.parallel.zero} shares over replicas, and there is one: dp = 1 "
            f"(parallel.zero=0, or fewer tp x pp)"
        )
    piece = layout.dp * train.microbatch
    if piece and train.global_batch % piece:
        whole = max(1, round(train.global_batch / piece)) * piece
        found.append(
            f"train.global_batch={train.global_batch} is not a multiple of dp x train.microbatch = "
            f"{layout.dp} x {train.microbatch} (train.global_batch={whole})"
        )
    return found


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
    count = microbatches(config, layout) if layout.dp else 0
    if count % layout.pp:
        wanted = -(-count // layout.pp) * layout.pp * layout.dp * config.train.microbatch
        found.append(
            f"parallel.schedule=interleaved takes microbatches in groups of pp = {layout.pp}, and "
            f"{count} are no multiple (train.global_batch={wanted})"
        )
    return found


def _sequence_problems(config: Config, layout: Layout) -> list[str]:
    """Whether the sequence can be cut as asked."""
    length = config.train.sequence
    if not config.parallel.sp:
        return []
    if layout.tp == 1:
        why = "parallel.sp=true shards the sequence over tp, and tp is 1"
        return [f"{why} (parallel.sp=false or parallel.tp=2)"]
    if length % layout.tp:
        whole = max(1, round(length / layout.tp)) * layout.tp
        why = f"parallel.sp=true: tp = {layout.tp} does not divide train.sequence={length}"
        return [f"{why} (train.sequence={whole})"]
    return []


def _nearest_line(config: Config, asked: Layout, world: int) -> str:
    def distance(one: Layout) -> tuple[float, int]:
        steps = sum(
            abs(math.log2(max(1, one.size(axis)) / max(1, asked.size(axis)))) for axis in AXES
        )
        return steps, -one.dp

    fitting = sorted(legal(config, world), key=distance)
    if not fitting:
        return (
            f"no layout of {world} ranks fits this model and batch; change train.global_batch, "
            f"model.kv_heads, model.layers or --nproc-per-node"
        )
    shown = "; ".join(
        f"parallel.tp={one.tp} parallel.pp={one.pp} (dp={one.dp})" for one in fitting[:_SHOWN]
    )
    return f"nearest layouts that fit {world} ranks: {shown}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(choices: list[int], wanted: int) -> int:
    return min(choices, key=lambda one: abs(one - wanted))
