"""A pipeline schedule is data: for each stage the list of what it does, in order.

In: numbers of stages and microbatches. Out: lists of Action, which the executor runs and which a
picture, a bubble estimate or a memory plan may read as well. No torch here.

    1F1B, 3 stages, 4 microbatches           F2 = forward of microbatch 2, B0 = backward of 0
    stage 0   F0 F1 F2          B0 F3 B1    B2    B3
    stage 1      F0 F1    B0 F2 B1 F3 B2    B3
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a stage can do with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    RECV_INPUT = "<F"
    """Take the stage's input from the stage before."""
    SEND_OUTPUT = "F>"
    """Give the stage's output to the stage after."""
    RECV_GRADIENT = "B<"
    """Take the gradient of the output from the stage after."""
    SEND_GRADIENT = "<B"
    """Give the gradient of the input to the stage before."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one stage does with one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def peer(self) -> int:
        """The stage at the other end of a send or receive; itself for forward and backward."""
        if self.kind in {Kind.RECV_INPUT, Kind.SEND_GRADIENT}:
            return self.stage - 1
        if self.kind in {Kind.SEND_OUTPUT, Kind.RECV_GRADIENT}:
            return self.stage + 1
        return self.stage

    @property
    def moves(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind not in {Kind.FORWARD, Kind.BACKWARD}

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[Action]]:
    """1F1B (Narayanan et al. 2019, PipeDream-flush): fill, then alternate, then drain.

    Stage s keeps at most min(stages - s, microbatches) activations; the share of time in which a
    stage idles is (stages - 1) / (microbatches + stages - 1).
    """
    schedules = []
    for stage in range(stages):
        warmup = min(stages - stage - 1, microbatches)
        work = [(Kind.FORWARD, i) for i in range(warmup)]
        for i in range(microbatches - warmup):
            work += [(Kind.FORWARD, warmup + i), (Kind.BACKWARD, i)]
        work += [(Kind.BACKWARD, i) for i in range(microbatches - warmup, microbatches)]
        schedules.append(_with_transfers(work, stage, stages))
    return schedules


def _with_transfers(work: list[tuple[Kind, int]], stage: int, stages: int) -> list[Action]:
    """Add to forwards and backwards what they take and give.

    A receive stands just before its use and a send just after its making. So where a forward is
    followed by a backward, giving the output and taking the gradient stand side by side, with the
    same peer, and the peer has the mirror image: the executor starts them together, and neither
    side waits for the other to move first.
    """
    actions = []
    for kind, microbatch in work:
        forward = kind is Kind.FORWARD
        takes = stage > 0 if forward else stage < stages - 1
        gives = stage < stages - 1 if forward else stage > 0
        if takes:
            receive = Kind.RECV_INPUT if forward else Kind.RECV_GRADIENT
            actions.append(Action(receive, stage, microbatch))
        actions.append(Action(kind, stage, microbatch))
        if gives:
            send = Kind.SEND_OUTPUT if forward else Kind.SEND_GRADIENT
            actions.append(Action(send, stage, microbatch))
    return actions
