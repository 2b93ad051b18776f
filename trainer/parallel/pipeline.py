"""Pipeline parallelism: this rank's stages of the model, and the executor of a schedule.

In: a model whose `chain()` lists its parts, the pp axis, a list of actions, and microbatches.
Out: gradients added to the parameters, and the summed loss on the rank of the last stage.
A run without pp is a pipeline of one stage, so that accumulation over microbatches has one form.
Receives begin early and are waited for in phase "communication", never inside "forward" or
"backward".
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from collectors import annotate
from trainer.parallel.actions import COMPUTES, Action, Kind
from trainer.parallel.halves import Halves
from trainer.parallel.recompute import Keep, run
from trainer.parallel.stopwatch import Stopwatch
from trainer.split import layers_among

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from trainer.data import Microbatch
    from trainer.dropout import Passing
    from trainer.faults import Fault
    from trainer.mesh import Axis
    from trainer.model import NextTokenLoss

    Key = tuple[int, int]
    """Stage and microbatch."""


@dataclass(frozen=True)
class Part:
    """One step of a stage's chain."""

    path: str
    module: nn.Module
    keep: Keep
    """What of its activations stays after forward; the rest is computed again in backward."""
    mixes: bool
    """Whether positions see each other in it, so that it is told of their documents."""


def own_stages(parts: Sequence[str], axis: Axis, split: Sequence[range]) -> dict[int, list[str]]:
    """The paths of the parts of each stage that this rank holds, in order, from those of the chain.

    Rank r of p holds stages r, r + p, ... Layers are shared out as `split` says; what stands before
    them belongs to the first stage, what comes after to the last.
    """
    layers = layers_among(parts)
    held: dict[int, list[str]] = {}
    for stage, own in enumerate(split):
        if stage % axis.size == axis.index:
            low = 0 if stage == 0 else layers.start + own.start
            high = len(parts) if stage == len(split) - 1 else layers.start + own.stop
            held[stage] = list(parts[low:high])
    return held


class Pipeline:
    """Runs one rank's actions."""

    def __init__(
        self,
        stages: Mapping[int, list[Part]],
        loss: NextTokenLoss,
        axis: Axis,
        actions: list[Action],
        forwards: list[Action],
        *,
        width: int,
        dtype: torch.dtype,
        shards: int,
        autocast: torch.dtype | None,
        fault: Fault,
        passing: Passing,
        backward_ended: Callable[[], None],
    ) -> None:
        self.stages = stages
        self.loss = loss
        self.axis = axis
        self.actions = actions
        self.forwards = forwards
        """What `evaluate` does instead."""
        self.autocast = autocast
        self.fault = fault
        self.passing = passing
        """Told where each action stands, for what depends on it (dropout)."""
        self.backward_ended = backward_ended
        """Called after each backward, or first half of one."""
        self.last = max(stages) if axis.index == axis.size - 1 else -1
        """The stage that computes the loss; -1 where another rank has it."""
        first = next(p for part in next(iter(stages.values())) for p in part.module.parameters())
        self.device, self.dtype = first.device, dtype
        self.width = width
        self.shards = shards
        """Parts of the sequence that ranks hold between stages (sequence parallelism)."""
        self.stopwatch = Stopwatch(self.device)
        self._timed = axis.size > 1
        modules = {stage: [part.module for part in own] for stage, own in stages.items()}
        halves = any(action.kind is Kind.INPUT_GRADIENT for action in actions)
        self._halves = Halves(modules, self.device) if halves else None
        self._inputs: dict[Key, Tensor] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._gradients: dict[Key, Tensor] = {}
        self._coming: dict[tuple[Kind, Key], dist.Work] = {}
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def run(self, microbatches: list[Microbatch], divisor: Tensor) -> Tensor:
        """One step over `microbatches`; gradients are of the summed loss over `divisor`.

        Returns this rank's part of the summed loss: 0 except on the rank of the last stage.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.stopwatch.start()
        for action in self.actions:
            number, stage = action.microbatch, action.stage
            if action.kind in COMPUTES:
                self._await(action)
                phase = "forward" if action.kind is Kind.FORWARD else "backward"
                with annotate.phase(phase, microbatch=number, stage=stage):
                    total += self._compute(action, microbatches[number], divisor)
            else:
                with annotate.phase("communication", microbatch=number, stage=stage):
                    self._move(action, microbatches)
        if self._leaving:
            with annotate.phase("communication", stage=self.axis.index):
                self._settle(keep=0)
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: list[Microbatch]) -> Tensor:
        """This rank's part of the summed loss, as `run`, and nothing else."""
        parts = [part.module for parts in self.stages.values() for part in parts]
        modes = [(module, module.training) for part in parts for module in part.modules()]
        for part in parts:
            part.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        one = total + 1
        for action in self.forwards:
            number, stage = action.microbatch, action.stage
            if action.moves:
                with annotate.phase("communication", microbatch=number, stage=stage):
                    self._move(action, microbatches)
            else:
                self._await(action)
                with annotate.phase("evaluation", microbatch=number, stage=stage):
                    total += self._forward(stage, number, microbatches[number], one)
            if action.kind is Kind.SEND_OUTPUT or stage == self.last:
                self._outputs.pop((stage, number), None)
            if not action.moves:
                self._inputs.pop((stage, number), None)
        with annotate.phase("communication", stage=self.axis.index):
            self._settle(keep=0)
        for module, training in modes:
            module.training = training
        return total

    def _compute(self, action: Action, batch: Microbatch, divisor: Tensor) -> Tensor | float:
        """Do what computes, between two marks; the summed loss where it was a forward."""
        key = action.stage, action.microbatch
        self.passing.microbatch = action.microbatch
        loss: Tensor | float = 0.0
        if self._timed:
            self.stopwatch.mark()
        if action.kind is Kind.FORWARD:
            loss = self._forward(*key, batch, divisor)
        elif action.kind is Kind.WEIGHT_GRADIENT and self._halves:
            self._halves.weight_gradient(key)
        else:
            self._backward(key, batch)
        if self._timed:
            self.stopwatch.mark()
        return loss

    def _forward(self, stage: int, number: int, batch: Microbatch, divisor: Tensor) -> Tensor:
        """Returns the summed loss of the microbatch on the last stage, else 0."""
        self.fault.in_forward(number)
        x = batch.inputs if stage == 0 else self._inputs[stage, number]
        with self._precision():
            for part in self.stages[stage]:
                told = (x, batch.documents) if part.mixes and batch.documents else (x,)
                x = run(part.module, told, part.keep)
            if stage != self.last:
                self._outputs[stage, number] = x
                return torch.zeros((), dtype=torch.float64, device=self.device)
            summed: Tensor = self.loss(x, batch.targets)
        self._outputs[stage, number] = summed / divisor
        return summed.detach().double()

    def _backward(self, key: Key, batch: Microbatch) -> None:
        """A backward, or in a schedule of halves the first of them."""
        stage, number = key
        self.fault.in_backward(number)
        out = self._outputs.pop(key)
        gradient = None if stage == self.last else self._gradients.pop(key)
        if self._halves:
            x = self._inputs[key] if stage else batch.inputs
            self._halves.input_gradient(key, out, gradient, x)
        else:
            torch.autograd.backward(out, gradient)
        self.backward_ended()

    def _move(self, action: Action, microbatches: list[Microbatch]) -> None:
        """Begin a send or a receive; it ends in `_settle` or `_await`."""
        receives = action.kind in {Kind.RECV_INPUT, Kind.RECV_GRADIENT}
        tensor = self._buffer(action, microbatches)
        operation = dist.P2POp(
            dist.irecv if receives else dist.isend,
            tensor,
            peer=self.axis.ranks[action.peer % self.axis.size],
            group=self.axis.group,
            tag=_tag(action),
        )
        (work,) = dist.batch_isend_irecv([operation])
        key = (action.stage, action.microbatch)
        if not receives:
            self._leaving.append((work, tensor))
            self._settle(keep=2 * self.axis.size * len(self.stages))
            return
        self._coming[action.kind, key] = work
        (self._inputs if action.kind is Kind.RECV_INPUT else self._gradients)[key] = tensor

    def _await(self, action: Action) -> None:
        """Wait for what an action that computes takes from another rank."""
        forward, key = action.kind is Kind.FORWARD, (action.stage, action.microbatch)
        kind = Kind.RECV_INPUT if forward else Kind.RECV_GRADIENT
        work = self._coming.pop((kind, key), None)
        if work is None:
            return
        with annotate.phase("communication", microbatch=action.microbatch, stage=action.stage):
            work.wait()
        if forward:
            self._inputs[key].requires_grad_()

    def _buffer(self, action: Action, microbatches: list[Microbatch]) -> Tensor:
        """What a send gives, or where a receive lands."""
        key = (action.stage, action.microbatch)
        if action.kind is Kind.SEND_OUTPUT:
            return self._outputs[key].detach().to(self.dtype).contiguous()
        if action.kind is Kind.SEND_GRADIENT:
            gradient = self._inputs.pop(key).grad
            if gradient is None:
                raise RuntimeError(f"{action} of stage {action.stage} before its backward")
            return gradient.contiguous()
        samples, length = microbatches[action.microbatch].inputs.shape
        shape = (samples, length // self.shards, self.width)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _settle(self, keep: int) -> None:
        """Wait for all but the `keep` newest sends, which bounds the memory that they hold.

        It cannot deadlock: the receives of older sends stand earlier in their ranks' lists.
        """
        while len(self._leaving) > keep:
            work, _tensor = self._leaving.popleft()
            work.wait()

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def _tag(action: Action) -> int:
    """Tells apart moves between two ranks (gloo matches tags; NCCL, order)."""
    forward = action.kind in {Kind.SEND_OUTPUT, Kind.RECV_INPUT}
    arrives = action.stage if action.kind in {Kind.RECV_INPUT, Kind.RECV_GRADIENT} else action.peer
    return 2 * (action.microbatch * 1024 + arrives) + int(forward)
