"""How long a rank computed within a step, and from when to when: the measured side of the bubble.

In: `mark()` before and after everything that computes. Out: `read()`. No sync, no collective: on
CUDA the marks are events on the stream, read a step later, when they have long happened.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of one step on one rank."""

    busy: float = 0.0
    """Spent in forwards and backwards."""
    span: float = 0.0
    """From the begin of the first to the end of the last."""


class Stopwatch:
    """Marks in pairs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._before: list[torch.cuda.Event] = []
        """Of the step before."""

    def start(self) -> None:
        """Begin a step."""
        self._marks = []
        self._before, self._events = self._events, []

    def mark(self) -> None:
        """Something that computes begins, or has ended."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read(self) -> Reading:
        """Of this step; on CUDA of the step before, whose loss was already waited for."""
        if self.device.type == "cuda":
            marks = [self._before[0].elapsed_time(one) / 1e3 for one in self._before]
        else:
            marks = self._marks
        if not marks:
            return Reading()
        busy = sum(end - begin for begin, end in zip(marks[::2], marks[1::2], strict=True))
        return Reading(busy, marks[-1] - marks[0])


def bubble(busy: float, first: float, ranks: int) -> float | None:
    """The share of time in which the ranks of pipelines idled or moved data.

    `busy` is summed over all ranks, `first` is the span of the first rank, summed over pipelines:
    it begins the first forward and ends the last backward of every schedule. None: not measured.
    """
    return 1 - busy / (ranks * first) if first > 0 else None
