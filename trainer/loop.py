"""The training loop: data, forward and backward, one reduction, one optimizer step.

In: Config and the default process group. Out: `StepResult` for each step, the same on every rank.
The loss is the sum over all valid tokens of the global batch divided by their number, once: no
layout changes a factor anywhere. What the loop does is told to `collectors.annotate`.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from collectors import annotate
from trainer import evaluation, flops, optim, rate
from trainer import mesh as mesh_file
from trainer.build import build
from trainer.corpus import open_corpus
from trainer.data import Loader, Microbatch, require
from trainer.documents import visible_pairs
from trainer.layout import resolve
from trainer.model import IGNORE
from trainer.parallel import stopwatch, timeline
from trainer.parallel.context import positions
from trainer.parallel.expert import ExpertLoad, load_of, take_load
from trainer.scale import LossScale

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config import Config


@dataclass(frozen=True)
class StepResult:
    """What a step came to, over all ranks."""

    step: int
    loss: float
    """Nats a token, before the update."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Of the update; of one that was skipped, what it would have had."""
    tokens: int
    """Valid tokens of the global batch."""
    seconds: float
    """Of this rank's clock, without evaluation."""
    flops: float | None
    """Model FLOPs of all ranks, as trainer/flops.py counts them; None where it cannot."""
    peak: float | None
    """FLOP/s that all ranks' GPUs could do; None where their peak is not known."""
    memory: tuple[int, ...]
    """Bytes that each rank holds: resident on CPU, the allocator's peak on CUDA."""
    loss_scale: float | None
    """By which the loss of this step was scaled; None where there is no scaling."""
    skipped: int
    """Steps until now whose update was skipped, this one included."""
    load: tuple[ExpertLoad, ...] = ()
    """Of each layer, where the model has experts."""
    evaluation: float | None = None
    """Nats a token of held-out samples, after the update; None where no evaluation was due."""
    bubble: float | None = None
    """Share of time in which pipeline ranks idled or moved data; None where none was measured."""
    predicted_bubble: float = 0.0
    """What the schedule's lists foretell."""


@dataclass(frozen=True)
class _Sums:
    """What a step's sum over the world tells every rank."""

    loss: torch.Tensor
    """Nats a token."""
    norm: torch.Tensor
    overflow: torch.Tensor
    """Ranks with a gradient that is not finite; above 0, all must skip (0 without a scale)."""
    memory: torch.Tensor
    """Bytes, by rank."""
    load: torch.Tensor
    """Choices of each expert, as take_load has them."""
    busy: torch.Tensor
    """Seconds in forwards and backwards, over all ranks."""
    span: torch.Tensor
    """Seconds from first forward to last backward on the first rank of each pipeline, summed."""


class Trainer:
    """One rank of a run."""

    def __init__(self, config: Config, world: int, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.layout = resolve(config, world)
        self.mesh = mesh_file.build(
            self.layout,
            config.mesh.order,
            device,
            config.parallel.timeout,
            config.parallel.replicate,
        )
        cp = self.mesh["cp"]
        self._own = positions(config.train.sequence, cp.index, cp.size)
        self._positions = config.train.global_batch * config.train.sequence
        corpus = open_corpus(config.data, config.train.sequence + 1)
        self.loader = Loader(
            corpus,
            sequence=config.train.sequence,
            global_batch=config.train.global_batch,
            microbatch=config.train.microbatch,
            seed=config.train.seed,
            end=config.data.end,
            documents=config.data.documents,
            vocabulary=config.model.vocabulary,
            held=config.eval.held if config.eval.every else 0.0,
        )
        evaluated = config.eval.batches * config.train.global_batch if config.eval.every else 0
        require(self.loader, evaluated)
        self.built = build(config, self.layout, self.mesh, device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = flops.peak(name, config.train.dtype)
        self.peak = peak and peak * world
        self.predicted_bubble = timeline.bubble(self.built.schedules, self.built.costs)
        self.optimizer = optim.adamw(self.built.pieces, config.optim, self.built.shapes)
        self.scale = LossScale(config.scale, on=config.train.dtype == "float16")
        self.built.fault.install(self)

    def step(self, number: int) -> StepResult:
        """Run optimizer step `number`."""
        with annotate.step(number):
            began = time.perf_counter()
            batches = self._load(number)
            tokens, pairs = self._count(batches)
            self.built.buckets.start()
            self.built.passing.step = number
            scale = self.scale.value
            for router in self.built.routers:
                router.scale = scale
            own_loss = self.built.pipeline.run(batches, self.built.fault.divisor(tokens) / scale)
            with annotate.phase("communication"):
                self.built.buckets.finish()
                self.built.partial.finish()
            self.scale.unscale(self.built.pieces.values())
            sums = self._over_world(own_loss, tokens)
            lr = rate.learning_rate(number - self.scale.skipped, self.config)
            finite = not (self.scale.on and sums.overflow.item())
            if finite:
                self._update(sums.norm, lr)
            self.scale.update(finite=finite)
            result = StepResult(
                step=number,
                loss=sums.loss.item(),
                grad_norm=sums.norm.item(),
                lr=lr,
                tokens=int(tokens.item()),
                seconds=time.perf_counter() - began,
                flops=flops.of_step(self.config.model, self._positions, int(pairs.item())),
                peak=self.peak,
                memory=tuple(int(one) for one in sums.memory.tolist()),
                load=load_of(self.built.routers, sums.load.tolist()),
                bubble=stopwatch.bubble(sums.busy.item(), sums.span.item(), self.layout.pp),
                predicted_bubble=self.predicted_bubble,
                loss_scale=scale if self.scale.on else None,
                skipped=self.scale.skipped,
            )
            _tell(result)
            if evaluation.is_due(number, self.config):
                held_loss = evaluation.evaluate(self)
                result = replace(result, evaluation=held_loss)
                annotate.numbers(evaluation_loss=held_loss)
        return result

    def held(self, number: int) -> list[Microbatch]:
        """This rank's part of a global batch of held-out samples."""
        return self._read(partial(self.loader.load_held, number))

    def _load(self, number: int) -> list[Microbatch]:
        def load(dp_index: int, dp_size: int) -> list[Microbatch]:
            self.built.fault.begin(number, self.loader)
            return self.loader.load(number, dp_index, dp_size)

        return self._read(load)

    def _read(self, load: Callable[[int, int], list[Microbatch]]) -> list[Microbatch]:
        """What `load` gives this rank's dp index, at this rank's positions, on its device."""
        dp = self.mesh["dp"]
        with annotate.phase("data"):
            batches = load(dp.index, dp.size)
            if self.mesh["cp"].size > 1:
                batches = [batch.at(self._own) for batch in batches]
        if self.device.type == "cpu":
            return batches
        with annotate.phase("h2d"):
            return [batch.to(self.device) for batch in batches]

    def _count(self, batches: list[Microbatch]) -> torch.Tensor:
        """Of the global batch: valid tokens, which every rank divides its loss by, and pairs of a
        position and one that it sees."""
        valid = torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum()
        pairs = sum(
            visible_pairs(self._own, batch.documents, len(batch.inputs)) for batch in batches
        )
        counts = torch.stack((valid.double(), valid.new_full((), pairs).double()))
        with annotate.phase("communication"):
            self.mesh.data.all_reduce(counts)
        return counts

    def _over_world(self, own_loss: torch.Tensor, tokens: torch.Tensor) -> _Sums:
        """What all ranks must know, in one sum over the world.

        Each rank adds only what no other does: its dp and cp share of the loss (the last stage's,
        once a tp group), its own part of the squared norm, its times, its memory in its own place,
        and its tokens' choices of experts (once a tp group too). Of overflow each tells of all
        that it holds, counted in the norm or not.
        """
        first = self.mesh["tp"].index == 0
        square = optim.own_square(self.built.pieces, self.built.sharded, self.mesh)
        load = take_load(self.built.routers, self.device)
        known = 5 + self.mesh.world
        values = torch.zeros(known + load.numel(), dtype=torch.float64, device=self.device)
        values[0] = own_loss if first else 0.0
        values[1] = square
        values[2] = self.scale.overflowed(self.built.pieces.values())
        times = self.built.pipeline.stopwatch.read()
        values[3] = times.busy
        values[4] = times.span if self.mesh["pp"].index == 0 else 0.0
        values[5 + self.mesh.rank] = held_memory(self.device)
        values[known:] = load if first else 0.0
        with annotate.phase("communication"):
            values = self.built.fault.over_world(values, self.mesh)
        return _Sums(
            loss=values[0] / tokens,
            norm=values[1].sqrt(),
            overflow=values[2],
            memory=values[5:known],
            load=values[known : known + load.numel()],
            busy=values[3],
            span=values[4],
        )

    def _update(self, norm: torch.Tensor, lr: float) -> None:
        with annotate.phase("optimizer"):
            optim.clip(self.built.pieces, norm, self.config.optim.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        if self.built.buckets.pieces:
            with annotate.phase("communication"):
                self.built.buckets.updated()


def held_memory(device: torch.device) -> int:
    """Bytes: resident set of this process on CPU (proc_pid_statm(5)), allocator's peak on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (each step: no Path)
        return int(file.read().split()[1]) * resource.getpagesize()


def _tell(result: StepResult) -> None:
    """The step's numbers, to whoever listens."""
    scale = result.loss_scale
    more = {} if scale is None else {"loss_scale": scale, "skipped_steps": float(result.skipped)}
    if result.bubble is not None:
        more |= {"bubble": result.bubble, "predicted_bubble": result.predicted_bubble}
    annotate.numbers(
        loss=result.loss, grad_norm=result.grad_norm, tokens=float(result.tokens), **more
    )
    for one in result.load:
        annotate.expert_load(one.layer, one.shares, one.dropped)
