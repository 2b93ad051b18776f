"""A job under `diag run` must behave as without it: bytes, exit code, terminal, signals."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectors.samplers.proc import stat

SCRIPTS = Path(__file__).parents[1] / "scripts"
COUNTER = str(SCRIPTS / "signal_counter.py")


def diag_run(*options: str) -> list[str]:
    return [sys.executable, "-m", "diag", "run", "--no-agent", *options, "--"]


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*diag_run("--run-dir", str(tmp_path / "r")), *command],
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 3", 3), ("kill -TERM $$", 143)],
)
def test_the_exit_code_is_the_jobs_own(tmp_path: Path, script: str, code: int) -> None:
    assert run(tmp_path, "sh", "-c", script).returncode == code


def test_a_command_that_is_not_there_is_127_and_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "no-such-program-anywhere")
    assert done.returncode == 127
    assert (
        done.stderr == b"diag: cannot start no-such-program-anywhere: No such file or directory\n"
    )
    assert not (tmp_path / "r").exists()


def test_every_byte_arrives_on_its_own_stream_and_in_the_copies(tmp_path: Path) -> None:
    script = (
        "import os; blob = bytes(range(256)) * 4096\n"
        "os.write(1, b'first'); n = 0\n"
        "while n < len(blob): n += os.write(1, blob[n:])\n"
        "os.write(2, b'\\x00\\xff no newline')"
    )
    done = run(tmp_path, sys.executable, "-c", script)
    assert done.stdout == b"first" + bytes(range(256)) * 4096
    assert done.stderr.startswith(b"\x00\xff no newline")
    assert (tmp_path / "r/job.stdout").read_bytes() == done.stdout
    assert (tmp_path / "r/job.stderr").read_bytes() == b"\x00\xff no newline"


def test_order_is_kept_when_both_streams_go_to_one_place(tmp_path: Path) -> None:
    script = "import os\nfor i in range(200): os.write(1 + i % 2, b'%d\\n' % i)"
    done = subprocess.run(
        [*diag_run("--run-dir", str(tmp_path / "r")), sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    wanted = "".join(f"{i}\n" for i in range(200)).encode()
    assert done.stdout[: len(wanted)] == wanted


def test_stdin_is_the_jobs(tmp_path: Path) -> None:
    done = subprocess.run(
        [*diag_run("--run-dir", str(tmp_path / "r")), "cat"],
        input=b"line\n\x00",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"line\n\x00"


def test_a_reader_that_goes_away_ends_the_job_as_without_us(tmp_path: Path) -> None:
    command = " ".join([*diag_run("--run-dir", str(tmp_path / "r")), "yes"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [b"y", str(128 + signal.SIGPIPE).encode()]


def test_an_unwritable_run_directory_is_one_line_and_the_job_runs(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file is in the way")
    done = subprocess.run(
        [*diag_run("--run-dir", str(tmp_path / "r/sub")), "sh", "-c", "echo fine; exit 5"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, b"fine\n")
    assert len(done.stderr.splitlines()) == 1
    assert b"runs unwatched" in done.stderr


def test_a_run_directory_that_vanishes_does_not_disturb_the_job(tmp_path: Path) -> None:
    script = f"rm -rf {tmp_path / 'r'}; echo after; exit 4"
    done = run(tmp_path, "sh", "-c", script)
    assert (done.returncode, done.stdout) == (4, b"after\n")
    assert b"Traceback" not in done.stderr


class Terminal:
    """diag in a fresh session whose controlling terminal is a pseudo-terminal of ours."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)  # noqa: S606 - the test's own command
        self.seen = b""

    def until(self, pattern: bytes, seconds: float = 30) -> re.Match[bytes]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.search(pattern, self.seen)
            if found:
                return found
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 4096)
                except OSError:
                    break
        pytest.fail(f"{pattern!r} did not come; there was {self.seen!r}")

    def code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    script = "import os; print([os.isatty(i) for i in range(3)], os.get_terminal_size(1))"
    command = [*diag_run("--run-dir", str(tmp_path / "r")), sys.executable, "-c", script]
    shell = f"stty cols 77 rows 13; exec {' '.join(repr(word) for word in command)}"
    terminal = Terminal(["/bin/sh", "-c", shell])
    terminal.until(rb"\[True, True, True\] os.terminal_size\(columns=77, lines=13\)\r\n")
    assert terminal.code() == 0


def test_ctrl_c_typed_at_a_terminal_reaches_the_job_once(tmp_path: Path) -> None:
    command = diag_run("--run-dir", str(tmp_path / "r"))
    terminal = Terminal([*command, sys.executable, COUNTER, "0.5"])
    terminal.until(rb"ready \d+\r")
    os.write(terminal.fd, b"\x03")
    assert terminal.until(rb"counts ([^\r]*)\r")[1] == b"SIGINT=1"
    assert terminal.code() == 0
    assert '"interrupted": true' in (tmp_path / "r/run.json").read_text()


def test_ctrl_z_stops_the_job_and_fg_goes_on(tmp_path: Path) -> None:
    terminal = Terminal(["/bin/sh", "-i"])
    command = [*diag_run("--run-dir", str(tmp_path / "r")), sys.executable, COUNTER, "0.5"]
    os.write(terminal.fd, (" ".join(command) + "\n").encode())
    job = int(terminal.until(rb"ready (\d+)\r")[1])
    os.write(terminal.fd, b"\x1a")
    terminal.until(rb"Stopped")
    # The shell reports as soon as diag has stopped; the job follows within a moment.
    until = time.monotonic() + 10
    while (now := stat(job)) and now.state != "T" and time.monotonic() < until:
        time.sleep(0.02)
    assert now is not None
    assert now.state == "T"
    os.write(terminal.fd, b"fg\n")
    time.sleep(0.5)
    os.write(terminal.fd, b"\x03")
    assert terminal.until(rb"counts ([^\r]*)\r")[1] == b"SIGINT=1"
    terminal.until(rb"report  ")
    os.write(terminal.fd, b"exit 9\n")
    assert terminal.code() == 9


def start_counter(tmp_path: Path, **extra: object) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen(
        [*diag_run("--run-dir", str(tmp_path / "r")), sys.executable, COUNTER, "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **extra,  # type: ignore[call-overload]
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


def test_every_signal_to_diag_reaches_the_job_once(tmp_path: Path) -> None:
    process, _ = start_counter(tmp_path)
    names = ["SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"]
    for name in names:
        process.send_signal(signal.Signals[name])
        time.sleep(0.1)
    out, _ = process.communicate(timeout=60)
    assert out == ("counts " + " ".join(f"{name}=1" for name in names) + "\n").encode()
    assert process.returncode == 0


def test_signals_to_the_group_and_to_diag_each_count_once(tmp_path: Path) -> None:
    process, _ = start_counter(tmp_path, start_new_session=True)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert out == b"counts SIGINT=3 SIGTERM=1\n"


def test_the_job_lives_and_prints_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    process, job = start_counter(tmp_path)
    process.kill()
    process.wait(timeout=10)
    os.kill(job, signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.read() == b"counts SIGUSR1=1\n"
    assert (tmp_path / "r/job.stdout").read_bytes().endswith(b"counts SIGUSR1=1\n")


def test_ignored_signals_stay_ignored_and_defaults_stay_defaults(tmp_path: Path) -> None:
    script = (
        "import signal; print([signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGTERM)],"
        " signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    shell = " ".join(repr(w) for w in [*diag_run("--run-dir", "r"), sys.executable, "-c", script])
    done = subprocess.run(
        ["sh", "-c", f"trap '' HUP; {shell}"],
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"['SIG_IGN', 'SIG_DFL'] set()\n"
