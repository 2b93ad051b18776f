"""When a job counts as stuck: a small state machine, pure but for its own memory.

In: how far each rank is, look by look. Out: an event when progress has stopped for too long, and
another when it goes on. Nothing here reads a clock: the caller says how long it really watched, so
that a suspended machine, a stopped supervisor or a jump of the clock never looks like a hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class RankView(Protocol):
    """How far a rank is; `collectors.agent.live.LiveRank` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def records(self) -> int: ...
    @property
    def last_ns(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def step_median_ns(self) -> int | None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def phase(self) -> str | None: ...


class LiveSource(Protocol):
    """Where views come from."""

    def poll(self) -> Sequence[RankView]: ...


@dataclass(frozen=True)
class HangPolicy:
    """Thresholds of hang detection and of what follows. Times in seconds."""

    after: float | None = None
    """The user's --hang-after: once any rank has written a record, this and nothing else decides.
    None: adaptive, by the fields below."""
    startup: float = 300.0
    """Patience before any rank finished a step: compilation and data preparation are silent. Lower
    it and a slow start is called a hang; raise it and a mismatch in the first step waits longer."""
    floor: float = 30.0
    """Least patience after the first step; short pauses (a slow batch, a checkpoint that nobody
    announced) stay below it."""
    steps: float = 20.0
    """Patience in typical step times, so that a job with minutes a step is not called stuck."""
    slow_phases: tuple[str, ...] = ("checkpoint", "compile", "evaluation")
    """While any rank is in one of these, and while some ranks have left regularly, patience is that
    of the start-up."""
    look_apart: float = 3.0
    """Between the two looks of a capture: what did not move meanwhile is stuck and not slow."""
    captures: int = 8
    """Captures of one run at most, so that a job that stutters for days fills no disk."""
    kill_grace: float = 45.0
    """Between SIGTERM and SIGKILL with --on-hang kill; torchrun gives its ranks 30 s."""

    def patience(self, ranks: Sequence[RankView]) -> float:
        """Seconds without progress that make a hang, for ranks (all, closed ones too) as given."""
        if self.after is not None:
            started = any(r.records for r in ranks)
            return self.after if started else max(self.after, self.startup)
        if not any(r.steps for r in ranks):
            return self.startup
        typical = max((r.step_median_ns or 0 for r in ranks), default=0) / 1e9
        limit = max(self.floor, self.steps * typical)
        if any(r.closed or r.phase in self.slow_phases for r in ranks):
            limit = max(limit, self.startup)
        return limit


@dataclass(frozen=True)
class Hang:
    """Progress has stopped."""

    since_ns: int
    """Time of the newest record of any rank."""
    after: float
    """The patience that ran out, seconds."""


@dataclass(frozen=True)
class Resumed:
    """Progress goes on after a hang that was reported."""

    idle: float
    """How long nothing had happened, seconds."""


class Progress:
    """Remembers the last look; says when a hang begins and when it ends."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._last: object = None
        self._idle = 0.0
        self._hung = False

    def look(
        self, ranks: Sequence[RankView], open_ranks: int, watched: float
    ) -> Hang | Resumed | None:
        """One look.

        `ranks` are the current attempt's; `open_ranks` says how many of them still have a process
        and have not closed their log; `watched` is the time since the previous look, seconds.
        """
        now = tuple((r.rank, r.attempt, r.records, r.last_ns, r.steps, r.closed) for r in ranks)
        if now != self._last or not open_ranks:
            idle, hung = self._idle, self._hung
            self._last, self._idle, self._hung = now, 0.0, False
            return Resumed(idle) if hung and open_ranks else None
        self._idle += watched
        limit = self._policy.patience(ranks)
        if self._hung or self._idle < limit:
            return None
        self._hung = True
        return Hang(max(r.last_ns for r in ranks), limit)

    def excuse(self) -> None:
        """Start counting anew: the silence has a reason that is no hang."""
        self._idle, self._hung = 0.0, False


def current(ranks: Sequence[RankView]) -> list[RankView]:
    """The ranks of the newest restart attempt."""
    newest = max((r.attempt for r in ranks), default=0)
    return [r for r in ranks if r.attempt == newest]
