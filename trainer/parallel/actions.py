"""What a pipeline stage can do with a microbatch: the words in which schedules are written.

In: nothing. Out: `Kind`, `Action`, `Work`; `schedule.py` writes lists of them, the executor runs
them, `timeline.py` predicts from them and `drawing.py` draws them. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a stage can do with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    INPUT_GRADIENT = "I"
    """The first half of a backward: what the stage before waits for, and nothing else."""
    WEIGHT_GRADIENT = "W"
    """The second half: nobody waits for it, so it may fill what would be idle."""
    RECV_INPUT = "<F"
    """Take the stage's input from the stage before."""
    SEND_OUTPUT = "F>"
    """Give the stage's output to the stage after."""
    RECV_GRADIENT = "B<"
    """Take the gradient of the output from the stage after."""
    SEND_GRADIENT = "<B"
    """Give the gradient of the input to the stage before."""


COMPUTES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
"""The others are moves between ranks."""
GIVES_BACK = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
"""What makes the gradient that the stage before waits for."""
FREES = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})
"""What ends the life of a microbatch's activations on a stage."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one stage does with one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def peer(self) -> int:
        """The stage at the other end of a send or receive; itself for what computes."""
        if self.kind in {Kind.RECV_INPUT, Kind.SEND_GRADIENT}:
            return self.stage - 1
        if self.kind in {Kind.SEND_OUTPUT, Kind.RECV_GRADIENT}:
            return self.stage + 1
        return self.stage

    @property
    def moves(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind not in COMPUTES

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Work = list[tuple[Kind, int, int]]
"""What one rank computes, in order: kind, stage, microbatch."""
