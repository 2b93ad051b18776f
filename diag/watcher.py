"""The thread that watches the ranks while the job runs: their ends, and whether they get on.

In: the ranks' live state, read from the run directory. Out: lines of exits.jsonl as they happen,
and callbacks on a hang and on its end. Costs some hundred microseconds a quarter of a second.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from collectors.samplers import proc
from diag import exits, rundir, voice
from diag.watch import Hang, HangPolicy, LiveSource, Progress, RankView, current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

TICK = 0.25
"""Seconds between looks at the ranks."""
_GAP = 1.0
"""A longer pause between two looks (we were stopped, the machine slept) counts as this much."""
_PRINTED = 1 << 20
"""Bytes at the end of the job's output that are searched for the launcher's exit codes."""


class Watcher(threading.Thread):
    """Watches until `stop`."""

    def __init__(
        self,
        run_dir: Path,
        live: LiveSource,
        policy: HangPolicy,
        host: str,
        on_hang: Callable[[Hang, Mapping[int, int]], None],
        on_resumed: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_hang(hang, pids)` runs in a thread of its own; pids: rank -> process on this host.

        `on_resumed()` is called when the ranks make progress again after a hang.
        """
        super().__init__(name="watcher", daemon=True)
        self._run_dir = run_dir
        self._live = live
        self._progress = Progress(policy)
        self._host = host
        self._exits = exits.RankExits(host)
        self._on_hang = on_hang
        self._on_resumed = on_resumed
        self._end = threading.Event()
        self._busy: threading.Thread | None = None
        self._stopped: set[int] = set()

    def run(self) -> None:
        """Body of the thread."""
        last = time.monotonic()
        while not self._end.is_set():
            try:
                now = time.monotonic()
                self._look(min(now - last, _GAP))
                last = now
                self._note_ends(self._exits.wait(TICK))
            except Exception as wrong:  # noqa: BLE001 - our own fault must not end the watching
                voice.trouble("watching the ranks failed", wrong)
                self._end.wait(TICK)

    def stop(self) -> None:
        """End the watching, wait for a capture under way, and keep the last ends of ranks."""
        self._end.set()
        self.join(5.0)
        if self._busy is not None:
            self._busy.join(60.0)
        try:
            self._follow()
            while ended := self._exits.wait(0.1):
                self._note_ends(ended)
            self._fill_from_launcher()
        except Exception as wrong:  # noqa: BLE001 - our own fault must not cost the job's exit code
            voice.trouble("the ends of ranks are not complete", wrong)

    def running(self) -> list[int]:
        """Process ids of ranks on this host that have not ended."""
        return self._exits.running_pids()

    def _follow(self) -> Sequence[RankView]:
        """The ranks as they are now, those of this host followed to their ends."""
        views = self._live.poll()
        for view in views:
            if view.host == self._host:
                self._exits.follow(view.rank, view.attempt, view.pid)
        return views

    def _look(self, watched: float) -> None:
        ranks = current(self._follow())
        alive = self._exits.running()
        here = [r for r in ranks if r.host == self._host]
        live = [r for r in here if not r.closed and (r.rank, r.attempt) in alive]
        event = self._progress.look(ranks, len(live), watched)
        if event is None:
            return
        if not isinstance(event, Hang):
            voice.note(f"the ranks make progress again, after {event.idle:.0f} s")
            self._on_resumed()
            return
        stopped = {r.rank for r in live if (s := proc.stat(r.pid)) and s.state in "Tt"}
        if stopped:
            self._progress.excuse()
            if stopped != self._stopped:
                names = ", ".join(str(r) for r in sorted(stopped))
                voice.note(f"no progress: rank {names} is stopped (SIGSTOP or a debugger)")
            self._stopped = stopped
            return
        if self._busy is None or not self._busy.is_alive():
            pids = {r.rank: r.pid for r in live}
            self._busy = threading.Thread(
                target=self._on_hang, args=(event, pids), name="hang", daemon=True
            )
            self._busy.start()

    def _note_ends(self, ended: list[exits.Exit]) -> None:
        for end in ended:
            rundir.append_line(self._run_dir / "exits.jsonl", end.as_json())

    def _fill_from_launcher(self) -> None:
        """Rewrite exits.jsonl when torchrun printed an exit code that the kernel did not tell."""
        if all(end.status_from != "unknown" for end in self._exits.seen):
            return
        printed: dict[int, int] = {}
        for name in ("job.stdout", "job.stderr"):
            path = self._run_dir / name
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _PRINTED))
                    printed |= exits.from_launcher(file.read().decode("utf-8", "replace"))
        filled = exits.complete(self._exits.seen, printed)
        rundir.write_lines(self._run_dir / "exits.jsonl", [end.as_json() for end in filled])
