"""Pipeline parallelism: this rank's part of the model, and the executor of a schedule.

In: a model whose `chain()` lists its parts, the pp axis, a list of actions, and microbatches.
Out: gradients added to the parameters, and the summed loss on the last stage.
A run without pp is a pipeline of one stage, so that accumulation over microbatches has one form.
Receives wait in phase "communication", never inside "forward" or "backward".
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from collectors import annotate
from trainer.layout import stage_layers
from trainer.parallel.schedule import Action, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from trainer.data import Microbatch
    from trainer.faults import Fault
    from trainer.mesh import Axis
    from trainer.model import NextByteLoss, Transformer


def keep_stage(model: Transformer, axis: Axis) -> None:
    """Drop the parts that other stages hold; what stays keeps its path, and so its start values."""
    own = stage_layers(len(model.layers), axis.size)[axis.index]
    for layer in list(model.layers):
        if int(layer) not in own:
            del model.layers[layer]
    if axis.index > 0:
        del model.embed
    if axis.index < axis.size - 1:
        del model.norm
        del model.head


class Pipeline:
    """Runs one stage's actions."""

    def __init__(
        self,
        model: Transformer,
        loss: NextByteLoss,
        axis: Axis,
        actions: list[Action],
        *,
        autocast: torch.dtype | None,
        fault: Fault,
        shards: int,
    ) -> None:
        self.model = model
        self.loss = loss
        self.axis = axis
        self.steps = list(_moves_together(actions))
        self.autocast = autocast
        self.fault = fault
        self.first = axis.index == 0
        self.last = axis.index == axis.size - 1
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.width: int = model.width
        self.shards = shards
        """Parts of the sequence that ranks hold between stages (sequence parallelism)."""
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def run(self, microbatches: list[Microbatch], tokens: Tensor) -> Tensor:
        """One step over `microbatches`; gradients are of the summed loss over `tokens`.

        Returns this rank's part of the summed loss: 0 except on the last stage.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for actions in self.steps:
            action = actions[0]
            if action.moves:
                self._move(actions, microbatches)
            elif action.kind is Kind.FORWARD:
                with annotate.phase("forward", microbatch=action.microbatch, stage=self.axis.index):
                    total += self._forward(action.microbatch, microbatches, tokens)
            else:
                with annotate.phase(
                    "backward", microbatch=action.microbatch, stage=self.axis.index
                ):
                    self._backward(action.microbatch)
        if self._leaving:
            with annotate.phase("communication", stage=self.axis.index):
                self._settle(keep=0)
        return total

    def _forward(self, index: int, microbatches: list[Microbatch], tokens: Tensor) -> Tensor:
        """Returns the summed loss of the microbatch on the last stage, else 0."""
        self.fault.in_forward(index)
        batch = microbatches[index]
        x = batch.inputs if self.first else self._inputs[index]
        with self._precision():
            out = self.model(x)
            if not self.last:
                self._outputs[index] = out
                return torch.zeros((), dtype=torch.float64, device=self.device)
            summed: Tensor = self.loss(out, batch.targets)
        self._outputs[index] = summed / tokens
        return summed.detach().double()

    def _backward(self, index: int) -> None:
        self.fault.in_backward(index)
        out = self._outputs.pop(index)
        torch.autograd.backward(out, None if self.last else self._gradients.pop(index))

    def _move(self, actions: list[Action], microbatches: list[Microbatch]) -> None:
        """Start adjacent sends and receives with one peer together, then wait for the receives."""
        operations = []
        for action in actions:
            receives = action.kind in {Kind.RECV_INPUT, Kind.RECV_GRADIENT}
            operations.append(
                dist.P2POp(
                    dist.irecv if receives else dist.isend,
                    self._buffer(action, microbatches),
                    peer=self.axis.ranks[action.peer],
                    group=self.axis.group,
                    tag=_tag(action),
                )
            )
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL: one work stands for all
            works = works * len(operations)
        label = actions[-1].microbatch
        with annotate.phase("communication", microbatch=label, stage=self.axis.index):
            for action, operation, work in zip(actions, operations, works, strict=True):
                if operation.op is dist.isend:
                    self._leaving.append((work, operation.tensor))
                else:
                    work.wait()
                    self._take(action, operation.tensor)
            self._settle(keep=2 * self.axis.size)

    def _buffer(self, action: Action, microbatches: list[Microbatch]) -> Tensor:
        """What a send gives, or where a receive lands."""
        index = action.microbatch
        if action.kind is Kind.SEND_OUTPUT:
            return self._outputs[index].detach().contiguous()
        if action.kind is Kind.SEND_GRADIENT:
            gradient = self._inputs.pop(index).grad
            if gradient is None:
                raise RuntimeError(f"{action} of stage {action.stage} before its backward")
            return gradient.contiguous()
        samples, length = microbatches[index].inputs.shape
        shape = (samples, length // self.shards, self.width)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _take(self, action: Action, received: Tensor) -> None:
        if action.kind is Kind.RECV_INPUT:
            self._inputs[action.microbatch] = received.requires_grad_()
        else:
            self._gradients[action.microbatch] = received

    def _settle(self, keep: int) -> None:
        """Wait for all but the `keep` newest sends, which bounds the memory that they hold.

        It cannot deadlock: a peer takes what this stage sent long ago without any later send.
        """
        while len(self._leaving) > keep:
            work, _tensor = self._leaving.popleft()
            work.wait()

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def _moves_together(actions: list[Action]) -> Iterator[list[Action]]:
    """Lists of actions to start at once: adjacent moves with the same peer, all else alone."""
    together: list[Action] = []
    for action in actions:
        fits = together and action.moves and together[-1].moves
        if fits and action.peer == together[-1].peer:
            together.append(action)
            continue
        if together:
            yield together
        together = [action]
    if together:
        yield together


def _tag(action: Action) -> int:
    """Outputs and gradients of all microbatches, told apart (gloo matches tags; NCCL, order)."""
    forward = action.kind in {Kind.SEND_OUTPUT, Kind.RECV_INPUT}
    return 2 * action.microbatch + int(forward)
