"""Which layers each stage of the pipeline has, and what its actions are expected to cost.

In: parallel.split and memory.checkpoint, the chain's paths, the schedule's lists. Out: a range of
layers a stage, the same on every rank, and Costs. Only what is measured needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer import split
from trainer.config import ConfigError
from trainer.limits.stages import split_problems
from trainer.parallel import timeline
from trainer.parallel.recompute import Keep, keep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from trainer.config import Config
    from trainer.layout import Layout
    from trainer.mesh import Mesh
    from trainer.parallel.actions import Action
    from trainer.parallel.balance import Bench


def decide(
    config: Config,
    layout: Layout,
    paths: Sequence[str],
    schedules: Sequence[Sequence[Action]],
    mesh: Mesh,
    device: torch.device,
) -> tuple[list[range], timeline.Costs]:
    """(layers of each stage, costs) for a chain of parts. ConfigError where no split fits."""
    if config.parallel.split != ("measured",):
        return told(config, paths, layout.pp * config.parallel.virtual)
    from trainer.parallel import balance

    loads = balance.measure(_bench(config, layout, mesh, device), mesh)
    in_flight = timeline.in_flight_of_stages(schedules)
    layers = balance.choose(loads, in_flight, config.memory.limit, mesh, device)
    seconds = [split.need(loads, own, at, in_flight)[0] for at, own in enumerate(layers)]
    return layers, timeline.costs([one / 3 for one in seconds])


def told(config: Config, paths: Sequence[str], stages: int) -> tuple[list[range], timeline.Costs]:
    """The same where nothing is measured: a layer costs 1, and the other parts nothing."""
    inside = split.layers_among(paths)
    if config.parallel.split == ("even",):
        layers = split.even(len(inside), stages)
    else:
        if wrong := split_problems(config.parallel.split, len(inside), stages):
            raise ConfigError(wrong)
        layers = split.listed([int(one) for one in config.parallel.split])
    again = [
        sum(keep(paths[inside[at]], config.memory.checkpoint, stage) is Keep.INPUT for at in own)
        for stage, own in enumerate(layers)
    ]
    return layers, timeline.costs([len(own) for own in layers], again)


def _bench(config: Config, layout: Layout, mesh: Mesh, device: torch.device) -> Bench:
    """How this run's parts are measured, on a copy of the model that nothing else uses."""
    from trainer.cut import PRODUCTS, whole_cut
    from trainer.parallel.balance import Bench

    cut, words = whole_cut(config, layout, mesh), config.memory.checkpoint
    return Bench(
        chain=cut.chain,
        device=device,
        autocast=PRODUCTS.get(config.train.dtype),
        samples=config.train.microbatch,
        positions=config.train.sequence // layout.cp,
        shards=layout.tp if config.parallel.sp else 1,
        width=cut.whole.width,
        vocabulary=config.model.vocabulary,
        loss=cut.loss,
        keep=lambda path: keep(path, words, 0) if len(words) == 1 else Keep.ALL,
        occupy=lambda path, part: cut.occupy([(path, part)], config, mesh, device),
        copies=_copies(config, mesh.shard.size),
    )


def _copies(config: Config, ranks: int) -> float:
    """Times that the device holds a parameter's bytes, `ranks` sharing them as ZeRO says.

    Once itself, once its gradient, and two moments of AdamW where these are not on the host.
    """
    zero, offload = config.parallel.zero, config.memory.offload
    shares = [1 / ranks if zero >= stage else 1.0 for stage in (3, 2, 1)]
    if offload == "parameters":
        shares[0] = 0.0
    if offload != "none":
        shares[2] = 0.0
    return shares[0] + shares[1] + 2 * shares[2]
