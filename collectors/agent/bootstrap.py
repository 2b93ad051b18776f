"""Decides whether this process is a rank, and if so attaches the agent once torch is there.

A process becomes a rank when it imports torch with RANK in its environment (torchrun and the like)
and is no launcher, or calls init_process_group (mp.spawn), or runs backward without either (a
single-process job). Everything else (launchers, data workers, tools, forked children) is left
alone. One rank claims one directory; a restart attempt gets its own.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.abc
import importlib.util
import os
import platform
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ALONE, CLAIM, RUN_DIR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from .agent import Agent

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")

agent: Agent | None = None
"""The agent of this process, once it is a rank."""
_given_up = False
"""Attaching failed: said once, not tried again."""


class _After(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported, once, and is otherwise not there."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  the protocol's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        call = self._calls.pop(fullname, None)
        if call is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _quietly(lambda: call(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this one loader only
        return spec


def _quietly(call: Callable[[], None]) -> None:
    """Run our own set-up; a failure is one line, and the job goes on unwatched."""
    global _given_up
    try:
        call()
    except Exception as why:  # noqa: BLE001  never into the job
        _given_up = True
        sys.stderr.write(f"diag: this process is not watched: {type(why).__name__}: {why}\n")


def start() -> None:
    """Called by sitecustomize, long before torch: costs a few microseconds."""
    sys.meta_path.insert(
        0, _After({"torch": _torch_imported, "collectors.annotate": _annotate_imported})
    )
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """A forked child shares the mapping but is not the rank: its hooks fall silent."""
    global agent
    agent = None


def _is_launcher() -> bool:
    words = sys.orig_argv
    if Path(sys.argv[0] if sys.argv else "").name in _LAUNCHERS:
        return True
    if "-m" in words and words.index("-m") + 1 < len(words):
        return words[words.index("-m") + 1].startswith(_LAUNCHER_MODULES)
    return False


def _torch_imported(torch: ModuleType) -> None:
    from . import hooks

    hooks.install(torch, rank_of_group=_group_made, rank_alone=_alone, current=lambda: agent)
    if "RANK" in os.environ and _free() and not _is_launcher():
        attach(torch, int(os.environ["RANK"]), _world())
        os.environ[CLAIM] = str(os.getpid())


def _free() -> bool:
    """Whether no ancestor of this process is a rank of a group."""
    return os.environ.get(CLAIM, ALONE).startswith(ALONE)


def _world() -> int | None:
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else None


def _group_made(torch: Any, rank: int, world: int) -> None:
    """init_process_group made the default group: whoever we thought we were, this is our rank."""
    # A rank's child that makes a group of its own (a tool, a nested job) is not this job's rank.
    if agent is None and not _given_up and _free():
        _quietly(lambda: attach(torch, rank, world))
        os.environ[CLAIM] = str(os.getpid())


def _alone(torch: Any) -> None:
    """Backward ran in a process that is no rank of anything."""
    if agent is None and not _given_up and os.environ.get(CLAIM) is None:
        _quietly(lambda: attach(torch, 0, 1))
        os.environ[CLAIM] = f"{ALONE}{os.getpid()}"


def _directory(run: Path, rank: int) -> tuple[Path, int]:
    """A new directory of this rank, and its attempt; FileExistsError when all are taken."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
    for number in range(attempt, attempt + 100):
        path = run / "ranks" / (f"{rank:05d}" + (f".{number}" if number else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path, number
    raise FileExistsError(f"{run}/ranks/{rank:05d}: 100 attempts are there already")


def attach(torch: Any, rank: int, world: int | None) -> None:
    """Make this process the rank: its directory, its log, its listener."""
    global agent
    from .agent import Agent

    directory, attempt = _directory(Path(os.environ[RUN_DIR]), rank)
    local = os.environ.get("LOCAL_RANK", "")
    meta = {
        "rank": rank,
        "attempt": attempt,
        "local_rank": int(local) if local.isdigit() else None,
        "world_size": world,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "argv": sys.argv[:20],
    }
    agent = Agent(torch, directory, meta)
    atexit.register(_exit, agent)
    if not faulthandler.is_enabled():
        # Kept open for the life of the process: the handler writes to it while crashing.
        faulthandler.enable((directory / "fault.txt").open("w"))
    annotate = sys.modules.get("collectors.annotate")
    if annotate is not None:
        _annotate_imported(annotate)


def _exit(mine: Agent) -> None:
    if mine is agent:
        _quietly(mine.finish)


def _annotate_imported(annotate: ModuleType) -> None:
    ours = Path(__file__).resolve().parents[1] / "annotate.py"
    if agent is not None and Path(annotate.__file__ or "").resolve() == ours:
        annotate.listen(agent.recorder)
