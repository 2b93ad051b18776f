"""Time that a phase took on the device, without ever waiting for the device.

Pairs of CUDA events from a pool, recorded on the current stream where a phase begins and ends, and
read when the device has passed them: at a later step's end, never by a synchronisation.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .flight import Writer

_MOST_PENDING = 4096
"""Pairs in flight; past that, a phase has no device time rather than an unbounded pool."""


class DeviceTimer:
    """Made only where a CUDA device is in use."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._pool: list[Any] = []
        self._begun: dict[int, Any] = {}
        self._pending: deque[tuple[int, Any, Any]] = deque()

    def _event(self) -> Any:
        return self._pool.pop() if self._pool else self._cuda.Event(enable_timing=True)

    def begin(self, slot: int) -> None:
        """Mark the begin of the phase in `slot` on the current stream."""
        if len(self._pending) + len(self._begun) >= _MOST_PENDING:
            return
        if self._cuda.is_current_stream_capturing():
            return  # an event recorded into a graph has no time of its own
        event = self._event()
        event.record()
        self._begun[slot] = event

    def end(self, slot: int) -> None:
        """Mark its end."""
        first = self._begun.pop(slot, None)
        if first is None or self._cuda.is_current_stream_capturing():
            return
        last = self._event()
        last.record()
        self._pending.append((slot, first, last))

    def collect(self, writer: Writer) -> None:
        """Write the times of all pairs that the device has passed."""
        while self._pending and self._pending[0][2].query():
            slot, first, last = self._pending.popleft()
            writer.waited(slot, int(first.elapsed_time(last) * 1e6))
            self._pool.extend((first, last))

    def memory(self) -> tuple[int, int, int]:
        """Bytes allocated, reserved, and the highest allocated so far."""
        values = (
            self._cuda.memory_allocated(),
            self._cuda.memory_reserved(),
            self._cuda.max_memory_allocated(),
        )
        return int(values[0]), int(values[1]), int(values[2])
