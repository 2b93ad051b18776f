"""Everything that accompanies a job with a run directory: record, samplers, watcher, reports.

In: the run directory and what was chosen. Out: run.json, captures, reports, and what is said on
stderr. It never touches the job; whether a hang ends the job it only says (`kill_wanted`).
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import sys
import threading
import time
from typing import TYPE_CHECKING

from collectors.samplers import kernel
from collectors.samplers.recorder import Recorder
from diag import voice
from diag.record import RunRecord
from diag.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from diag.watch import Hang, HangPolicy

_RESERVE = ".reserve"
_RESERVED = 512 << 10
"""Bytes kept free for run.json and the reports, should the disk be full when the job ends."""


class Companions:
    """Made before the job starts, started right after it."""

    def __init__(
        self,
        run_dir: Path,
        host: str,
        policy: HangPolicy,
        *,
        agent: bool,
        kill: bool,
        dashboard: bool,
    ) -> None:
        self.run_dir = run_dir
        self.kill_wanted = threading.Event()
        """Set when a hang was reported and --on-hang kill was chosen."""
        self._host = host
        self._policy = policy
        self._kill = kill
        self._boot = kernel.now()
        self._agent = agent
        self._wants_dashboard = dashboard
        self._dashboard: int | None = None
        self._hangs = 0
        self._record: RunRecord | None = None
        self._recorder = Recorder(run_dir, host)
        self._watcher: Watcher | None = None

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, object],
        agent_problems: Sequence[str],
    ) -> None:
        """Write run.json and start the threads."""
        self._record = RunRecord(self.run_dir, name, command, self._host)
        self._record.update(
            env=env, agent={"enabled": self._agent, "problems": list(agent_problems)}
        )
        self._recorder.start()
        if self._wants_dashboard:
            self._open_dashboard()
        if self._agent:
            from collectors.agent.live import LiveRanks

            live = LiveRanks(self.run_dir)
            self._watcher = Watcher(
                self.run_dir, live, self._policy, self._host, self._on_hang, self._on_resumed
            )
            self._watcher.start()

    def _open_dashboard(self) -> None:
        """The live dashboard, a process of its own; it prints its address, which goes to stderr."""
        words = [sys.executable, "-m", "diag", "dashboard", str(self.run_dir)]
        try:
            self._dashboard = os.posix_spawn(
                words[0],
                words,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, 2, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,  # a Ctrl-C is for the job
                setsigmask=(),
            )
        except OSError as wrong:
            voice.trouble("there is no dashboard", wrong)

    def ranks(self) -> list[int]:
        """Process ids of ranks on this host that have not ended."""
        return self._watcher.running() if self._watcher else []

    def settle(self, *, exit_code: int, signal: int | None, interrupted: bool) -> None:
        """The job has ended: stop the threads and complete run.json."""
        ended = time.time_ns()
        if self._watcher is not None:
            self._watcher.stop()
            left = self.ranks()
            if left:
                pids = ", ".join(str(pid) for pid in left)
                voice.note(f"the job's command has ended, but ranks of it still run (pid {pids})")
        self._recorder.stop()
        with contextlib.suppress(OSError):
            (self.run_dir / _RESERVE).unlink()
        problems = dict(self._recorder.problems)
        reason = self._kernel_log()
        if reason:
            problems["kernel"] = reason
        if self._record is not None:
            self._record.finish(
                self.run_dir,
                state="finished",
                ended_ns=ended,
                exit_code=exit_code,
                signal=signal,
                interrupted=interrupted,
                samplers=problems,
            )

    def close(self) -> None:
        """End what still runs: the live dashboard."""
        if self._dashboard is not None:
            os.kill(self._dashboard, signals.SIGTERM)
            os.waitpid(self._dashboard, 0)

    def report(self) -> None:
        """Judge the finished run, write its reports and print the verdict."""
        try:
            from diag import verdict

            answer = verdict.finish(self.run_dir)
            voice.say("\n" + verdict.as_text(*answer, self.run_dir, colour=voice.colour()))
        except Exception as wrong:  # noqa: BLE001 - no failure of ours changes the job's exit code
            voice.trouble("there is no report", wrong)

    def _kernel_log(self) -> str | None:
        """Keep what the kernel said since the start; returns why there is nothing to keep."""
        lines, reason = kernel.since(self._boot)
        if lines:
            try:
                folder = self.run_dir / "nodes" / self._host
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "kernel.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
            except OSError as wrong:
                voice.trouble("the kernel log could not be kept", wrong)
        return reason

    def _on_hang(self, hang: Hang, pids: Mapping[int, int]) -> None:
        """Runs in a thread of its own: capture, say, and perhaps ask for the end."""
        number = self._hangs
        self._hangs += 1
        try:
            if number < self._policy.captures:
                self._capture(hang, pids, number)
            else:
                voice.note(f"no progress for {hang.after:.0f} s again; no further capture is taken")
        except Exception as wrong:  # noqa: BLE001 - a hang has to be answered whatever fails here
            voice.trouble(f"no progress for {hang.after:.0f} s, and no verdict on it", wrong)
        if self._kill:
            self.kill_wanted.set()

    def _on_resumed(self) -> None:
        """Records that follow our own kill are no progress."""
        if self._record is not None and not self.kill_wanted.is_set():
            self._record.resumed()

    def _capture(self, hang: Hang, pids: Mapping[int, int], number: int) -> None:
        from diag import capture

        detected = time.time_ns()
        folder = f"captures/{number + 1:04d}-hang"
        voice.note(f"no rank makes progress for {hang.after:.0f} s; looking at every rank ...")
        try:
            capture.take(self.run_dir / folder, pids, self._host, self._policy.look_apart)
        except OSError as wrong:
            voice.trouble("the capture could not be written", wrong)
        self._kernel_log()
        facts = {
            "since_ns": hang.since_ns,
            "detected_ns": detected,
            "hang_after_s": hang.after,
            "capture": folder,
            "verdict_ns": None,
        }
        if self._record is not None:
            self._record.hang(number, **facts)
        from diag import verdict

        answer = verdict.judge(self.run_dir)
        voice.say("\n" + verdict.as_text(*answer, self.run_dir, colour=voice.colour()))
        if self._record is not None:
            self._record.hang(number, verdict_ns=time.time_ns())
        if not self._kill:
            voice.note("the job goes on; Ctrl-C ends it")


def remove_empty(run_dir: Path) -> None:
    """Take back a run directory whose job could not be started."""
    for name in ("job.stdout", "job.stderr", _RESERVE):
        (run_dir / name).unlink(missing_ok=True)
    for folder in sorted(run_dir.rglob("*"), reverse=True):
        folder.rmdir()
    run_dir.rmdir()


def prepare(run_dir: Path, host: str) -> None:
    """Make the folders that the job's own libraries write to, and put space for the end aside.

    Raises OSError.
    """
    from diag.switches import FLIGHT_RECORDER

    (run_dir / FLIGHT_RECORDER).mkdir(parents=True, exist_ok=True)
    (run_dir / "nodes" / host).mkdir(parents=True, exist_ok=True)
    try:
        with (run_dir / _RESERVE).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVED)
    except OSError:  # nearly full already: then the space is worth more to the agent
        (run_dir / _RESERVE).unlink(missing_ok=True)
