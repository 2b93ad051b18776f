"""The thread that samples this node while a job runs, into `nodes/<host>/` of the run.

Out: host.jsonl and devices.jsonl, one JSON row a line, in the words of the tables they become.
Any error of ours (disk full, folder gone) ends the recording with a reason and disturbs nobody.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from collectors.samplers.devices import DeviceSampler, open_devices
from collectors.samplers.host import HostSampler

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

INTERVAL = 2.0
"""Seconds between samples in the first hour."""
SAMPLES = 1800
"""Samples of the first stretch; after it the interval grows with the run's age, so that a long run
adds lines ever more slowly and the files stay small (a month: about 15,000 lines)."""


class Recorder(threading.Thread):
    """Samples until `stop`; then takes a last sample, so that a memory kill at the end shows."""

    def __init__(self, run_dir: Path, host: str) -> None:
        super().__init__(name="recorder", daemon=True)
        self._folder = run_dir / "nodes" / host
        self._host = HostSampler(host, run_dir)
        self._name = host
        self._end = threading.Event()
        self.problems: dict[str, str] = {}
        """Why something was not recorded: "devices" or "host" -> reason."""

    def run(self) -> None:
        """Body of the thread."""
        devices, reason = open_devices(self._name)
        if reason is not None:
            self.problems["devices"] = reason
        began = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._end.wait(max(INTERVAL, (time.monotonic() - began) / SAMPLES)):
                self._record(devices)
            self._record(devices)
        except OSError as wrong:
            self.problems["host"] = f"sampling ended: {wrong}"

    def stop(self) -> None:
        """Take the last sample and end; returns within a second."""
        self._end.set()
        self.join(1.0)

    def _record(self, devices: DeviceSampler | None) -> None:
        self._append("host.jsonl", [self._host.sample()])
        if devices is not None:
            self._append("devices.jsonl", devices.sample())

    def _append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(text)
