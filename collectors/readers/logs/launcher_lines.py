"""Lines of launchers and schedulers: torchelastic's agent, DeepSpeed, mpirun, Slurm, Kubernetes.

In: the bare text of a line. Out: rules. `exit_code` and `signal` are exclusive: a negative exit
code is the number of a signal, and words such as "Killed" are the signal that they stand for.
"""

from __future__ import annotations

from typing import Any

from collectors.readers.logs.rule import rule

_SIGNALS = {
    "Hangup": 1,
    "Interrupt": 2,
    "Quit": 3,
    "Illegal instruction": 4,
    "Aborted": 6,
    "Bus error": 7,
    "Floating point exception": 8,
    "Killed": 9,
    "Segmentation fault": 11,
    "Terminated": 15,
}
SIGNAL_NAMES = {
    "SIGHUP": 1,
    "SIGINT": 2,
    "SIGQUIT": 3,
    "SIGILL": 4,
    "SIGABRT": 6,
    "SIGBUS": 7,
    "SIGFPE": 8,
    "SIGKILL": 9,
    "SIGSEGV": 11,
    "SIGTERM": 15,
}
_WORDS = "|".join(_SIGNALS)


def split_status(out: dict[str, Any]) -> None:
    """A negative `exit_code` becomes `signal`."""
    code = out.get("exit_code")
    if isinstance(code, int) and code < 0:
        out["signal"] = -code
        out["exit_code"] = None


def _status(_text: str, out: dict[str, Any]) -> None:
    split_status(out)


def _word(text: str, out: dict[str, Any]) -> None:
    word = out.pop("word", None)
    if word in _SIGNALS:
        out["signal"] = _SIGNALS[word]
    elif word == "Out Of Memory":
        out["out_of_memory"] = True
    name = out.pop("signal_name", None)
    if name in SIGNAL_NAMES:
        out["signal"] = SIGNAL_NAMES[name]
    out["core_dumped"] = "core dumped" in text


def _tasks(text: str, out: dict[str, Any]) -> None:
    """`tasks 0-3,7:` of srun."""
    listed: list[int] = []
    for part in str(out.pop("listed", "")).split(","):
        first, dash, last = part.strip().partition("-")
        if (
            first.isdecimal()
            and len(first) < 8
            and (not dash or (last.isdecimal() and len(last) < 8))
        ):
            listed.extend(range(int(first), min(int(last or first), int(first) + 65_536) + 1))
    out["tasks"] = listed[:65_536]
    _word(text, out)


RULES = (
    rule(
        "elastic.worker-exit",
        "failed (exitcode:",
        r"failed \(exitcode: (?P<i_exit_code>-?\d+)\) local_rank: (?P<i_local_rank>\d+) \(pid: "
        r"(?P<i_pid>\d+)\) of (?:binary|fn): (?P<binary>\S+)",
        _status,
    ),
    rule(
        "elastic.signal-sent",
        "closing signal",
        r"Sending process (?P<i_pid>\d+) closing signal (?:Signals\.)?(?P<signal_name>\w+)",
        _word,
    ),
    rule(
        "elastic.death-signal",
        "death signal",
        r"Received (?:Signals\.)?(?P<signal_text>\w+) death signal",
    ),
    rule(
        "elastic.signal-exception",
        "SignalException",
        r"SignalException: Process (?P<i_pid>\d+) got signal: (?P<i_signal>\d+)",
    ),
    rule(
        "elastic.heartbeat-lost",
        "keep-alive heartbeat",
        r"The node '?(?P<node>[^']+?)'? has failed to send a keep-alive heartbeat",
    ),
    rule(
        "elastic.rendezvous",
        "Rendezvous",
        r"(?P<error>Rendezvous(?:Timeout|Connection|Closed|State)Error)\b:?\s*(?P<message>.*)",
    ),
    rule(
        "elastic.restart",
        "restart",
        r"(?:Restarting worker group|(?P<i_left>\d+)/(?P<i_most>\d+) attempts left; will restart "
        r"worker group)",
    ),
    rule(
        "deepspeed.exit",
        "exits with return code",
        r"(?:--local_rank=(?P<i_local_rank>\d+).*)?exits with return code = (?P<i_exit_code>-?\d+)",
        _status,
    ),
    rule("deepspeed.kill", "Killing subprocess", r"Killing subprocess (?P<i_pid>\d+)"),
    rule("mpi.exit", "Exit code:", r"^\s*Exit code:\s+(?P<i_exit_code>-?\d+)", _status),
    rule(
        "mpi.exit",
        "noticed that process rank",
        r"noticed that process rank (?P<i_task>\d+) with PID (?P<i_pid>\d+) on node (?P<host>\S+) "
        r"exited on signal (?P<i_signal>\d+)",
    ),
    rule(
        "slurm.task-exit",
        "task",
        rf"(?:srun|slurmstepd): error: (?P<host>[\w.-]+): tasks? (?P<listed>[\d,\- ]+): (?:Exited "
        rf"with exit code (?P<i_exit_code>\d+)|(?P<word>{_WORDS}|Out Of Memory))",
        _tasks,
    ),
    rule(
        "slurm.oom",
        "oom",
        r"Detected (?P<i_events>\d+) oom[-_ ]?kill event(?:\(?s\)?)? in "
        r"(?:StepId=)?(?P<step>[\w.]+)",
    ),
    rule("slurm.oom", "Exceeded", r"Exceeded (?P<what>step|job) memory limit"),
    rule(
        "slurm.cancelled",
        "CANCELLED AT",
        r"\*\*\* (?P<what>JOB|STEP) (?P<step>\S+) ON (?P<host>\S+) CANCELLED AT "
        r"(?P<at>[\dT:\-]+)(?: DUE TO (?P<reason>[A-Z _]+?)(?:,[^*]*)?)? \*\*\*",
    ),
    rule("slurm.node-failure", "Node failure", r"Node failure on (?P<host>[\w.-]+)"),
    rule("k8s.terminated", "OOMKilled", r"(?P<reason>OOMKilled)"),
    rule("k8s.terminated", "Evicted", r"\b(?P<reason>Evicted)\b(?P<message>.*)"),
    rule("k8s.node-not-ready", "NodeNotReady", r"(?P<reason>NodeNotReady)(?P<message>.*)"),
    rule(
        "process.terminate",
        "terminate called",
        r"terminate called after throwing an instance of '(?P<type>[^']+)'",
    ),
    rule("process.fault", "Fatal Python error", r"Fatal Python error: (?P<message>.*)"),
    rule(
        "process.fault",
        "Segmentation fault",
        r"^(?:\S+: line \d+:\s+(?P<i_pid>\d+)\s+)?(?P<word>Segmentation fault)",
        _word,
    ),
    rule("process.fault", "Caught signal", r"Caught signal (?P<i_signal>\d+) \((?P<message>[^)]*)"),
    rule(
        "dataloader.worker-killed",
        "DataLoader worker (pid",
        r"DataLoader worker \(pid\(?s?\)?,? ?(?P<i_pid>\d+).*?\) (?:is killed by signal: "
        r"(?P<word>[A-Za-z ]+?)|exited unexpectedly(?: with exit code "
        r"(?P<i_exit_code>\d+))?)(?:\.|$)",
        _word,
    ),
    rule("dataloader.bus-error", "bus error", r"[Uu]nexpected bus error encountered in worker"),
)
