"""Runs a job under watch: the parent of the job, and of everything that looks at it.

    diag run ──┬── the job, in our own process group: what a terminal or a launcher sends to all
               │   reaches it as it would without us; what is sent to diag alone is passed on, once
               ├── relay: carries the output on, and lives as long as the job does
               └── threads: recorder (this node), watcher (the ranks), a capture when they are stuck

In: a command and Options. Out: the job's own exit code, and a run directory with a report.
It must never change what the job does, and no failure of ours changes the exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diag import companions, rundir, streams, switches, voice
from diag.companions import Companions
from diag.watch import HangPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORWARDED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_TICK = 1.0
_DRAIN = 2.0
"""Seconds that the last output may take to reach its reader before we speak; it is never lost."""
_LEFTOVER = 5.0
"""Seconds that ranks get to end on SIGTERM after the job that had to be killed."""


@dataclass(frozen=True)
class Options:
    """What a user may choose."""

    run_dir: Path | None = None
    """--run-dir; None: runs/<HHMM>-<name>."""
    name: str | None = None
    """--name; None: from the command."""
    agent: bool = True
    """--no-agent turns it off: exit code, output and host only."""
    on_hang: Literal["report", "kill"] = "report"
    """What to do after a hang was reported."""
    dashboard: bool = False
    """--dashboard: a live dashboard while the job runs."""
    policy: HangPolicy = field(default_factory=HangPolicy)


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    exit_code: int
    """The job's own; 128 + signal when a signal ended it; 127 and 126 when it could not start."""
    run_dir: Path | None
    """None when there could be none."""


def _run_dir(options: Options, name: str) -> Path | None:
    """The run directory; None, and one line that says why, when there can be none."""
    try:
        if options.run_dir is None:
            return rundir.make(name)
        path, moved = rundir.claim(options.run_dir)
    except OSError as wrong:
        where = options.run_dir or Path("runs")
        voice.trouble(f"no run directory in {where}, so the job runs unwatched", wrong)
        return None
    if moved:
        voice.note(moved)
    return path


def _start(
    command: Sequence[str], env: dict[str, str], out: streams.Streams, mask: set[int]
) -> int:
    """Start the job; its process id. Raises OSError when it cannot be started."""
    return os.posix_spawnp(
        command[0],
        list(command),
        env,
        file_actions=[(os.POSIX_SPAWN_DUP2, ours, target) for target, ours in out.job.items()],
        setsigmask=mask,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them; the job must not
    )


class Supervisor:
    """One job from start to end."""

    def __init__(self, command: Sequence[str], options: Options, mask: set[int]) -> None:
        """`mask`: the signals that the job starts with blocked, as it would without us."""
        self._mask = mask
        self._command = command
        self._options = options
        self._name = options.name or rundir.name_of(command)
        self._host = os.uname().nodename
        self._job = 0
        self._relay: int | None = None
        self._companions: Companions | None = None
        self._interrupted = False
        self._killing: float | None = None

    def run(self) -> Outcome:
        """Run the job; returns when it has ended and was reported on."""
        run_dir = _run_dir(self._options, self._name)
        env, switched, problems = self._environment(run_dir)
        agent = self._options.agent and run_dir is not None and not problems
        kill = self._options.on_hang == "kill"
        if run_dir is not None:
            self._companions = Companions(
                run_dir,
                self._host,
                self._options.policy,
                agent=agent,
                kill=kill,
                dashboard=self._options.dashboard,
            )
        out = streams.start(run_dir)
        self._relay = out.relay
        try:
            self._job = _start(self._command, env, out, self._mask)
        except OSError as wrong:
            return self._not_started(wrong, run_dir)
        finally:
            out.close()
        if self._companions is not None:
            self._companions.start(self._name, self._command, switched, problems)
        status = self._wait_for_job()
        return self._wind_up(status, run_dir)

    def _environment(
        self, run_dir: Path | None
    ) -> tuple[dict[str, str], dict[str, object], list[str]]:
        """(the job's environment, what run.json says of it, why there is no agent)."""
        env = dict(os.environ)
        switched: dict[str, object] = {"set": {}, "kept": []}
        problems: list[str] = []
        if run_dir is None:
            return env, switched, problems
        try:
            run_dir = run_dir.resolve()
            companions.prepare(run_dir, self._host)
            chosen, kept = switches.choose(env, run_dir, self._host)
            env |= chosen
            switched = {"set": chosen, "kept": list(kept)}
            if self._options.agent:
                from collectors import agent

                env = agent.environment(run_dir, env)
        except (OSError, ImportError) as wrong:
            problems.append(str(wrong))
            voice.trouble("the job runs without the agent", wrong)
        return env, switched, problems

    def _not_started(self, wrong: OSError, run_dir: Path | None) -> Outcome:
        """As a shell: 127 when the command is not there, 126 when it cannot be run."""
        voice.note(f"cannot start {self._command[0]}: {wrong.strerror}")
        if run_dir is not None:
            with contextlib.suppress(OSError):
                companions.remove_empty(run_dir)
        return Outcome(127 if isinstance(wrong, FileNotFoundError) else 126, None)

    def _wait_for_job(self) -> int:
        """Wait for the job's end, passing signals on; its wait status."""
        while True:
            got = signal.sigtimedwait(FORWARDED | {signal.SIGCHLD}, _TICK)
            pid, status = os.waitpid(self._job, os.WNOHANG)
            if pid:
                return status
            self._reap_relay()
            if got is not None and got.si_signo != signal.SIGCHLD:
                self._pass_on(got.si_signo)
            self._end_if_wanted()

    def _pass_on(self, number: int) -> None:
        self._interrupted = self._interrupted or number in _ENDING
        if self._relay is None or not streams.sent_to_group(number, self._relay):
            os.kill(self._job, number)  # not reaped yet, so the number is still the job's

    def _end_if_wanted(self) -> None:
        """--on-hang kill: SIGTERM to the job, and SIGKILL to it and its ranks after a grace."""
        if self._companions is None or not self._companions.kill_wanted.is_set():
            return
        if self._killing is None:
            self._killing = time.monotonic()
            voice.note("ending the job, because it is stuck (--on-hang kill)")
            os.kill(self._job, signal.SIGTERM)
        elif time.monotonic() - self._killing > self._options.policy.kill_grace:
            os.kill(self._job, signal.SIGKILL)
            self._signal_ranks(signal.SIGKILL)

    def _signal_ranks(self, number: int) -> bool:
        """Send to every rank that has not ended; whether there was one."""
        ranks = self._companions.ranks() if self._companions else []
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(ranks)

    def _reap_relay(self, *, wait: float = 0.0) -> None:
        """Notice the relay's end; with `wait`, give it so many seconds to drain the output."""
        until = time.monotonic() + wait
        while self._relay is not None:
            pid, _ = os.waitpid(self._relay, os.WNOHANG)
            if pid:
                self._relay = None
            elif (left := until - time.monotonic()) <= 0:
                return
            else:
                signal.sigtimedwait({signal.SIGCHLD}, min(left, 0.05))

    def _wind_up(self, status: int, run_dir: Path | None) -> Outcome:
        code = os.waitstatus_to_exitcode(status)
        number = -code if code < 0 else None
        code = code if number is None else 128 + number
        if self._killing is not None and self._signal_ranks(signal.SIGTERM):
            until = time.monotonic() + _LEFTOVER
            while self._signal_ranks(0) and time.monotonic() < until:
                time.sleep(0.05)
            self._signal_ranks(signal.SIGKILL)
        self._reap_relay(wait=_DRAIN)
        if self._companions is not None:
            with _shielded(code, self._companions.run_dir):
                self._companions.settle(
                    exit_code=code, signal=number, interrupted=self._interrupted
                )
                self._companions.report()
                self._companions.close()
        return Outcome(code, run_dir)


@contextlib.contextmanager
def _shielded(code: int, run_dir: Path) -> Iterator[None]:
    """While the report is made: the first Ctrl-C or SIGTERM only asks, the second one leaves."""
    asked = False

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            voice.note(f"left without a report; `diag report {run_dir}` makes it")
            os._exit(code)
        asked = True
        voice.note("writing the report; once more to leave without it")

    patient = (signal.SIGINT, signal.SIGTERM)
    before = {n: h for n in patient if (h := signal.getsignal(n)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, patient)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, patient)
        for number, handler in before.items():
            signal.signal(number, handler)


def run(command: Sequence[str], options: Options | None = None) -> Outcome:
    """Run `command` under watch. For the main thread only: it takes over the signals meanwhile."""
    streams.ensure_standard()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
    try:
        return Supervisor(command, options or Options(), mask).run()
    finally:
        while signal.sigtimedwait(FORWARDED, 0) is not None:
            pass  # came too late for the job; it must not change how we end
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
