"""A step as a program that can be run again with other durations.

`Program` holds for each rank the list of what its host did, and for each operation who takes part
and how long it took once all had come; `programs.py` makes it from tables. `run` replays it, pure
arithmetic: a rank computes, issues, and waits; an operation ends its transfer time after its last
member issued it. Waits are therefore not copied but arise anew, so a change of one duration
reaches everybody whom it reaches in truth. The model is that of "Understanding Stragglers in Large
Model Training Using What-if Analysis" (Lin et al., OSDI 2025): order within a rank, meetings
between them.

    rank 0   compute 40 ms │ issue a │ compute 5 ms │ wait a
    rank 1   compute 70 ms │ issue a │              │ wait a       a ends at 70 ms + its transfer
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "host"
"""The label of what a rank does outside phases: Python, logging, launches."""


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch in which a rank computes; `label` is what it is compared with elsewhere."""

    rank: int
    label: tuple[str, str]
    """Phase, and number of the stretch within it; HOST, and what lies around, where no phase is."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rank's part in an operation: what it takes once the last member has issued it."""

    rank: int
    key: int
    """Equal on all members."""
    label: tuple[str, str]
    """Axis and operation."""
    seconds: float
    alone: bool
    """Whether it ended without waiting for the others (a send into a buffer)."""


@dataclass(frozen=True, slots=True)
class Issue:
    """The rank issues its part."""

    part: Transfer


@dataclass(frozen=True, slots=True)
class Await:
    """The rank waits for these parts together."""

    parts: tuple[Transfer, ...]


Event = Work | Issue | Await


@dataclass(frozen=True)
class Program:
    """One step of all ranks."""

    step: int
    events: dict[int, list[Event]]
    members: dict[int, int]
    """Operation -> how many ranks issue it."""
    seconds: float
    """What the step took."""

    @property
    def size(self) -> int:
        """Events of all ranks."""
        return sum(len(one) for one in self.events.values())


def run(program: Program, seconds: Callable[[Work | Transfer], float]) -> float:
    """Seconds that the step takes when each stretch and transfer takes `seconds(it)`.

    Raises ValueError when ranks wait for each other forever.
    """
    clock = dict.fromkeys(program.events, 0.0)
    place = dict.fromkeys(program.events, 0)
    issued: dict[int, list[float]] = defaultdict(list)
    own: dict[tuple[int, int], float] = {}
    blocked: dict[int, list[int]] = defaultdict(list)
    ready = deque(program.events)
    while ready:
        rank = ready.popleft()
        events = program.events[rank]
        while place[rank] < len(events):
            event = events[place[rank]]
            if isinstance(event, Work):
                clock[rank] += seconds(event)
            elif isinstance(event, Issue):
                key = event.part.key
                own[rank, key] = clock[rank]
                issued[key].append(clock[rank])
                if len(issued[key]) == program.members[key]:
                    ready.extend(blocked.pop(key, ()))
            else:
                late = _missing(event, program, issued)
                if late is not None:
                    blocked[late].append(rank)
                    break
                for part in event.parts:
                    begin = own[rank, part.key] if part.alone else max(issued[part.key])
                    clock[rank] = max(clock[rank], begin + seconds(part))
            place[rank] += 1
    if any(place[rank] < len(events) for rank, events in program.events.items()):
        raise ValueError("these operations wait for each other")
    return max(clock.values(), default=0.0)


def _missing(event: Await, program: Program, issued: dict[int, list[float]]) -> int | None:
    for part in event.parts:
        if not part.alone and len(issued[part.key]) < program.members[part.key]:
            return part.key
    return None
