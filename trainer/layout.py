"""Which parallel layouts a model, a batch and a world allow; arithmetic only, no torch.

In: a Config and a world size. Out: the Layout with dp filled in, every reason why it cannot work,
and the nearest layouts that can. Every check names the flag that changes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config import ALWAYS, AXES
from trainer.limits import checkpoint as checkpoint_limits
from trainer.limits import data as data_limits
from trainer.limits import expert, faults, numbers, sharing, stages

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig

_SHOWN = 3
"""Nearest layouts that an error names: enough to choose from, few enough to read."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes."""

    dp: int
    tp: int
    pp: int
    cp: int = 1
    ep: int = 1
    """Of the ranks of dp x cp."""

    def size(self, axis: str) -> int:
        """Ranks along one axis."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}[axis]

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp


def resolve(config: Config, world: int) -> Layout:
    """The layout asked for; dp=0 becomes what the others leave of the world (0: nothing fits)."""
    parallel = config.parallel
    dp = parallel.dp or world // (parallel.tp * parallel.pp * parallel.cp)
    return Layout(dp=dp, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep)


def microbatches(config: Config, layout: Layout) -> int:
    """Microbatches that each rank runs in a step."""
    return config.train.global_batch // (layout.dp * config.train.microbatch)


def problems(config: Config, world: int) -> list[str]:
    """Every reason why this layout cannot work, and the nearest ones that can."""
    layout = resolve(config, world)
    of_layout = _layout_problems(config, layout, world)
    found = [*_model_problems(config), *data_limits.problems(config), *of_layout]
    if of_layout:
        found.append(_nearest_line(config, layout, world))
    else:
        found += sharing.replicate_problems(config, layout)
    found += stages.list_problems(config, layout)
    found += checkpoint_limits.problems(config)
    found += faults.problems(config, layout)
    order = config.mesh.order
    needed = [axis for axis in AXES if axis in ALWAYS or layout.size(axis) > 1]
    if set(needed) - set(order) or set(order) - {*AXES, "ep"} or len(set(order)) < len(order):
        found.append(
            f"mesh.order={','.join(order)} must name each of {', '.join(needed)} once "
            f"(mesh.order={','.join(AXES)})"
        )
    return found + expert.order_problems(order)


def legal(config: Config, world: int) -> list[Layout]:
    """Every layout that this model, batch and world allow."""
    layouts = [
        Layout(dp=world // (cp * tp * pp), tp=tp, pp=pp, cp=cp, ep=ep)
        for cp in {1, config.parallel.cp}
        if cp <= world
        for tp in _divisors(world // cp)
        for pp in _divisors(world // cp // tp)
        for ep in expert.sharing(config.model.experts, world // (tp * pp))
        if ep == 1 or config.parallel.ep > 1
    ]
    return [
        one
        for one in layouts
        if not _layout_problems(config, one, world) + sharing.replicate_problems(config, one)
    ]


def _size_problems(model: ModelConfig) -> list[str]:
    """Whether the transformer's own sizes fit together."""
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
    return found


def _model_problems(config: Config) -> list[str]:
    found = [] if config.model.file else _size_problems(config.model)
    found += stages.word_problems(config)
    return (
        found
        + expert.model_problems(config)
        + numbers.problems(config)
        + sharing.setting_problems(config)
    )


def _layout_problems(config: Config, layout: Layout, world: int) -> list[str]:
    train = config.train
    found = []
    if layout.world != world and not config.parallel.dp:
        names, sizes = _product(layout, ("tp", "pp"))
        shared = layout.tp * layout.pp * layout.cp
        found.append(
            f"{names} = {sizes} = {shared} does not divide {world} ranks "
            f"(parallel.tp, parallel.pp, parallel.cp or --nproc-per-node)"
        )
    elif layout.world != world:
        names, sizes = _product(layout, ("dp", "tp", "pp"))
        found.append(
            f"{names} = {sizes} = {layout.world}, but there are {world} ranks "
            f"(parallel.dp, parallel.tp, parallel.pp, parallel.cp or --nproc-per-node)"
        )
    found += _split_problems(config, layout)
    found += stages.problems(config, layout)
    found += _sequence_problems(config, layout)
    found += expert.problems(config, layout)
    found += sharing.problems(config, layout)
    piece = layout.dp * train.microbatch
    if piece and train.global_batch % piece:
        whole = max(1, round(train.global_batch / piece)) * piece
        found.append(
            f"train.global_batch={train.global_batch} is not a multiple of dp x train.microbatch = "
            f"{layout.dp} x {train.microbatch} (train.global_batch={whole})"
        )
    return found


def _split_problems(config: Config, layout: Layout) -> list[str]:
    """Whether the transformer can be cut so; of a model.file its own chain and PLAN decide."""
    model = config.model
    found: list[str] = []
    if model.file:
        return found
    if layout.tp > model.kv_heads:
        found.append(
            f"parallel.tp={layout.tp} exceeds model.kv_heads={model.kv_heads}: each tp rank needs "
            f"a whole key/value head (parallel.tp={model.kv_heads} or model.kv_heads={layout.tp})"
        )
    split = (
        ("model.heads", model.heads),
        ("model.kv_heads", model.kv_heads),
        ("model.mlp", model.mlp),
        ("model.vocabulary", model.vocabulary),
    )
    common = math.gcd(*(size for _, size in split))
    bad = [f"{name}={size}" for name, size in split if size % layout.tp]
    if bad and layout.tp <= model.kv_heads:
        hint = f"parallel.tp={_nearest(_divisors(common), layout.tp)}"
        if bad == [f"model.vocabulary={model.vocabulary}"]:  # rows that no token uses do no harm
            hint += f" or model.vocabulary={-(-model.vocabulary // layout.tp) * layout.tp}"
        found.append(f"parallel.tp={layout.tp} does not divide {', '.join(bad)} ({hint})")
    return found


def _sequence_problems(config: Config, layout: Layout) -> list[str]:
    """Whether the sequence can be cut as asked."""
    length, cp = config.train.sequence, layout.cp
    if cp > 1 and length % (2 * cp):
        whole = max(1, round(length / (2 * cp))) * 2 * cp
        why = f"parallel.cp={cp} cuts a sequence into {2 * cp} chunks, which do not divide "
        return [f"{why}train.sequence={length} (train.sequence={whole})"]
    if not config.parallel.sp:
        return []
    if layout.tp == 1:
        why = "parallel.sp=true shards the sequence over tp, and tp is 1"
        return [f"{why} (parallel.sp=false or parallel.tp=2)"]
    if length // cp % layout.tp:
        step = math.lcm(2 * cp, cp * layout.tp) if cp > 1 else layout.tp
        whole = max(1, round(length / step)) * step
        share = f"train.sequence={length}" + (f" / {cp}" if cp > 1 else "")
        why = f"parallel.sp=true: tp = {layout.tp} does not divide {share}"
        return [f"{why} (train.sequence={whole})"]
    return []


def _nearest_line(config: Config, asked: Layout, world: int) -> str:
    def distance(one: Layout) -> tuple[float, int]:
        steps = sum(
            abs(math.log2(max(1, one.size(axis)) / max(1, asked.size(axis))))
            for axis in (*AXES, "ep")
        )
        return steps, -one.dp

    fitting = sorted(legal(config, world), key=distance)
    if not fitting:
        return (
            f"no layout of {world} ranks fits this model and batch; change train.global_batch, "
            f"model.kv_heads, model.layers or --nproc-per-node"
        )
    shown = "; ".join(
        f"parallel.tp={one.tp} parallel.pp={one.pp}"
        + (f" parallel.cp={one.cp}" if config.parallel.cp > 1 else "")
        + (f" parallel.ep={one.ep}" if config.parallel.ep > 1 else "")
        + f" (dp={one.dp})"
        for one in fitting[:_SHOWN]
    )
    return f"nearest layouts that fit {world} ranks: {shown}"


def _product(layout: Layout, names: tuple[str, ...]) -> tuple[str, str]:
    """`tp x pp` and `2 x 4`; cp joins where it is on."""
    names = (*names, "cp") if layout.cp > 1 else names
    return " x ".join(names), " x ".join(str(layout.size(name)) for name in names)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(choices: list[int], wanted: int) -> int:
    return min(choices, key=lambda one: abs(one - wanted))
