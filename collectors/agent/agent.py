"""One rank's agent: its flight log, its recorder, its ledger, and how it ended.

Made by bootstrap when the process is known to be a rank; torch's hooks (hooks.py) call into it.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from . import torch_compat
from .collective import Ledger
from .flight import Writer, now
from .recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from .cuda_timing import DeviceTimer

_MOST_TEXT = 20_000
"""Characters of a message or traceback that are kept: head and tail."""


def _cut(text: str) -> str:
    half = _MOST_TEXT // 2
    return text if len(text) <= _MOST_TEXT else f"{text[:half]}\n...\n{text[-half:]}"


class Agent:
    """What one rank records."""

    def __init__(self, torch: Any, directory: Path, meta: dict[str, Any]) -> None:
        meta["group_hooks"] = torch_compat.has_group_hooks(torch)
        self.directory = directory
        self.writer = Writer(directory, meta)
        self._torch = torch
        self.recorder = Recorder(self.writer, self._timer)
        self.ledger = Ledger(self.recorder, torch)
        if not meta["group_hooks"]:
            self.writer.note(
                problem=f"torch {meta['torch']} has no process-group hooks: collectives issued "
                "from C++ (DDP's own) are not seen"
            )
        self._failed = False
        previous = sys.excepthook

        def on_exception(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self.failed(error)
            previous(kind, error, trace)

        sys.excepthook = on_exception

    def _timer(self) -> DeviceTimer | None:
        """A timer once the job itself uses CUDA. Asking torch whether there is a device would
        initialise the driver, after which a forked child of the job cannot use it."""
        if not self._torch.cuda.is_initialized():
            return None
        from .cuda_timing import DeviceTimer

        self.writer.note(device=f"cuda:{self._torch.cuda.current_device()}")
        return DeviceTimer(self._torch)

    def failed(self, error: BaseException) -> None:
        """An exception reached the top of the main thread: keep it, once."""
        if self._failed or threading.current_thread() is not threading.main_thread():
            return
        self._failed = True
        try:
            text = "".join(traceback.format_exception(error))
            body = {
                "type": f"{type(error).__module__}.{type(error).__qualname__}",
                "message": _cut(str(error)),
                "traceback": _cut(text),
                "time_ns": now(),
            }
            (self.directory / "exception.json").write_text(json.dumps(body))
        except Exception as why:  # noqa: BLE001  the job's own error is what must be seen
            self.writer.note(problem=f"exception not recorded: {why}"[:400])

    def turn_off(self, why: Exception) -> None:
        """A hook failed: record no more, and say why once."""
        if not self.recorder.off:
            self.recorder.off = True
            self.writer.note(problem=f"agent off: {type(why).__name__}: {why}"[:400])

    def finish(self) -> None:
        """The interpreter exits by itself."""
        self.recorder.finish()
