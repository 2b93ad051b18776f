"""Steps, phases and numbers of one rank, from annotations or guessed from what torch does.

Two sources, one log. A program that annotates its steps (collectors.annotate) is believed; for any
other a step is what lies between two rounds of its first optimizer: it is complete when data or a
backward begins after that optimizer stepped, and it ended when the last optimizer call ended.
Phases come from hooks (hooks.py) and only from the thread that trains. A guessed forward is what
lies between the phase before and a backward, written when the backward begins: modules themselves
are left alone, since whatever is hung on them is compiled, copied and pickled with them.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

from . import flight
from .flight import now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from .cuda_timing import DeviceTimer

_DOUBLE = struct.Struct("<d")
_MEMORY_EVERY_NS = 200_000_000
"""Memory is sampled at a step's end, at most this often."""


def _read(path: str) -> bytes:
    """The content of a small file of /proc."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  no Path object in every step
        return file.read(256)


class _Open:
    """A context that closes what `begin` opened."""

    __slots__ = ("_recorder", "_slot", "_what")

    def __init__(self, recorder: Recorder, what: int, slot: int) -> None:
        self._recorder, self._what, self._slot = recorder, what, slot

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        failed = kind is not None
        if self._what == flight.STEP:
            self._recorder.step_end(self._slot, failed=failed)
        else:
            self._recorder.phase_end(self._slot, failed=failed)


class Recorder:
    """Also the listener of collectors.annotate."""

    def __init__(self, writer: flight.Writer, find_timer: Callable[[], DeviceTimer | None]) -> None:
        """`find_timer` is asked at each step until it gives one."""
        self.writer = writer
        self.timer: DeviceTimer | None = None
        self._find_timer = find_timer
        self.thread = threading.get_ident()
        self.current = -1
        """The step under way; -1 before the first."""
        self.explicit = False
        """Whether the program annotates its steps; then guesses are off."""
        self._open: list[tuple[int, int]] = []
        self._step_slot = -1
        self._step_start = 0
        self._steps_done = 0
        self._durations: deque[int] = deque(maxlen=15)
        self._primary = 0
        self._optimizer_end = 0
        self._microbatch = 0
        self._boundary = 0
        self._memory_at = 0
        self._cpu_start = self._cpu_end = (0, 0)
        self._page = os.sysconf("SC_PAGESIZE")
        self.off = False
        """Set once when a hook failed; nothing is recorded from then on."""

    # --- what collectors.annotate calls -----------------------------------------------------

    def step(self, number: int) -> _Open:
        self.explicit = True
        self.step_begin(number, now())
        return _Open(self, flight.STEP, self._step_slot)

    def phase(self, name: str, microbatch: int | None, stage: int | None) -> _Open:
        slot = self.phase_begin(
            name, -1 if microbatch is None else microbatch, -1 if stage is None else stage
        )
        return _Open(self, flight.PHASE, slot)

    def numbers(self, values: Mapping[str, float]) -> None:
        at = now()
        for key, value in values.items():
            bits = int.from_bytes(_DOUBLE.pack(float(value)), "little", signed=True)
            self.writer.put(
                flight.NUMBER, self.writer.name(key), at, state=flight.DONE, end=at, a=bits,
                step=self.current,
            )  # fmt: skip

    def expert_load(self, layer: int, shares: Sequence[float], dropped: float) -> None:
        """Four numbers a layer, however many experts: a record of each would flood the log.

        The entropy is that of the shares over that of even ones: 1 even, 0 collapsed to one expert.
        """
        busiest = max(range(len(shares)), key=shares.__getitem__)
        entropy = -sum(share * math.log(share) for share in shares if share > 0)
        self.numbers(
            {
                f"expert_load.{layer}.busiest": busiest,
                f"expert_load.{layer}.share": shares[busiest],
                f"expert_load.{layer}.entropy": entropy / math.log(max(2, len(shares))),
                f"expert_load.{layer}.dropped": dropped,
            }
        )

    def group(self, name: str, axis: str) -> None:
        self.writer.note(axis=axis, name=name)

    def mesh(self, coordinates: Mapping[str, int], order: tuple[str, ...]) -> None:
        self.writer.note(mesh=dict(coordinates), order=list(order))

    # --- steps ------------------------------------------------------------------------------

    def step_begin(self, number: int, at: int) -> None:
        self.current = number
        self._step_start = at
        self._microbatch = 0
        if self.timer is None:
            self.timer = self._find_timer()
        self._cpu_start = self._cpu()
        self._step_slot = self.writer.put(flight.STEP, 0, at, step=number, a=-1, b=-1)

    def step_end(self, slot: int, at: int = 0, *, failed: bool = False) -> None:
        end = at or now()
        ran, queued = self._cpu_end if at else self._cpu()
        if ran:
            self.writer.fill(slot, ran - self._cpu_start[0], queued - self._cpu_start[1])
        self.writer.finish(slot, end, flight.FAILED if failed else flight.DONE)
        self._step_slot = -1
        if failed:
            return
        self._steps_done += 1
        self._durations.append(end - self._step_start)
        typical = sorted(self._durations)[len(self._durations) // 2]
        self.writer.progress(self._steps_done, end, typical)
        if end - self._memory_at > _MEMORY_EVERY_NS:
            self._memory_at = end
            self.sample_memory(end)
        if self.timer is not None:
            self.timer.collect(self.writer)

    def _guess(self, at: int) -> None:
        """Data or a backward begins: close the step whose optimizer has run, open the next."""
        if self.explicit:
            return
        if self._optimizer_end and self._step_slot >= 0:
            self.step_end(self._step_slot, self._optimizer_end)
            at, self._optimizer_end = self._optimizer_end, 0
            self.step_begin(self.current + 1, at)
            self._cpu_start = self._cpu_end
        elif self._step_slot < 0:
            self.step_begin(self.current + 1, at)

    def optimizer_done(self, optimizer: int) -> None:
        """An optimizer's step() returned; `optimizer` is its identity."""
        if self._primary == 0:
            self._primary = optimizer
        if optimizer == self._primary or self._optimizer_end:
            self._optimizer_end = self._boundary = now()
            self._cpu_end = self._cpu()

    def _cpu(self) -> tuple[int, int]:
        """(ns that the training thread ran, ns that it waited for a core); zeros when unknown."""
        try:
            ran, queued, _slices = _read("/proc/thread-self/schedstat").split()
        except OSError:
            return 0, 0
        return int(ran), int(queued)

    def finish(self) -> None:
        """Regular exit: close the step that the last optimizer call completed."""
        if not self.explicit and self._optimizer_end and self._step_slot >= 0:
            self.step_end(self._step_slot, self._optimizer_end)
        if self.timer is not None:
            self.timer.collect(self.writer)
        self.writer.close()

    # --- phases -----------------------------------------------------------------------------

    def auto_phase(self, name: str) -> int:
        """A guessed phase begins; -1 when it is not to be recorded (other thread, nested)."""
        if self.explicit or self._open or threading.get_ident() != self.thread:
            return -1
        microbatch = -1
        if name in ("data", "backward"):
            at = now()
            self._guess(at)
            if name == "backward":
                microbatch = self._microbatch
                self._microbatch += 1
                self._forward(at, microbatch)
        return self.phase_begin(name, microbatch, -1)

    def _forward(self, at: int, microbatch: int) -> None:
        """A backward begins: what was since the phase before it was its forward."""
        if self._boundary >= self._step_start > 0:
            self.writer.put(
                flight.PHASE, self.writer.name("forward"), self._boundary, state=flight.DONE,
                end=at, step=self.current, microbatch=microbatch,
            )  # fmt: skip

    def phase_begin(self, name: str, microbatch: int, stage: int) -> int:
        number = self.writer.name(name)
        slot = self.writer.put(
            flight.PHASE, number, now(), step=self.current, microbatch=microbatch, stage=stage
        )
        self._open.append((slot, number))
        self.writer.phase(number)
        if self.timer is not None:
            self.timer.begin(slot)
        return slot

    def phase_end(self, slot: int, *, failed: bool = False) -> None:
        if slot < 0:
            return
        if self.timer is not None:
            self.timer.end(slot)
        self._boundary = now()
        self.writer.finish(slot, self._boundary, flight.FAILED if failed else flight.DONE)
        # What an exception left open inside goes with it.
        while self._open and self._open[-1][0] >= slot:
            self._open.pop()
        self.writer.phase(self._open[-1][1] if self._open else 0)

    # --- memory -----------------------------------------------------------------------------

    def sample_memory(self, at: int) -> None:
        """One record: a = allocated, b = reserved, seq = peak (device), begin = resident set."""
        resident = int(_read("/proc/self/statm").split()[1]) * self._page
        allocated, reserved, peak = self.timer.memory() if self.timer is not None else (-1, -1, -1)
        self.writer.put(
            flight.MEMORY, 0, at, state=flight.DONE, end=at, begin=resident, a=allocated,
            b=reserved, seq=peak, step=self.current,
        )  # fmt: skip
