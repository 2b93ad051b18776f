"""run.json as it grows: written at the start, on a hang and at the end, always as a whole."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from collectors.samplers import cgroup
from diag import rundir, voice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


_LIBRARIES = (
    "torch", "numpy", "transformers", "accelerate", "lightning", "deepspeed", "flash-attn",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton",
)  # fmt: skip
"""Whose version can change how a job runs; absent ones are left out."""
_TOLD = (
    "NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "KMP_",
    "TORCHELASTIC_", "TOKENIZERS_PARALLELISM",
)  # fmt: skip
_GIT = 2.0
"""Seconds that git may take to answer."""


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _code(folder: Path) -> dict[str, Any]:
    """The commit of the working directory and whether files differ from it; empty without git."""
    words = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "status"]
    words += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_GIT, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}  # no git, no repository, or one too large to ask while a job waits to start
    lines = done.stdout.splitlines()
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    changed = sum(not line.startswith("#") for line in lines)
    return {"commit": heads[0], "changed_files": changed} if heads else {}


def _environment() -> dict[str, str]:
    """The variables that decide how torch and its transports behave; none that holds a secret."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(_TOLD)}


class RunRecord:
    """The content of run.json (schema diag.run/1); threads may update it."""

    def __init__(self, run_dir: Path, name: str, command: Sequence[str], host: str) -> None:
        self._path = run_dir / "run.json"
        self._lock = threading.Lock()
        self._kills = cgroup.memory().oom_kills
        self._content: dict[str, Any] = {
            "schema": rundir.SCHEMA,
            "name": name,
            "command": list(command),
            "cwd": str(run_dir.cwd()),
            "host": host,
            "pid": os.getpid(),
            "started_ns": time.time_ns(),
            "ended_ns": None,
            "state": "running",
            "exit_code": None,
            "signal": None,
            "interrupted": False,
            "world_size": None,
            "attempts": 1,
            "versions": {"python": platform.python_version(), "diag": _version("diag-training")}
            | {name: found for name in _LIBRARIES if (found := _version(name)) is not None},
            "code": _code(run_dir.cwd()),
            "environment": _environment(),
            "env": {"set": {}, "kept": []},
            "agent": {"enabled": False, "problems": []},
            "samplers": {},
            "memory_kills": None,
            "hangs": [],
        }

    def update(self, **fields: Any) -> None:
        """Change fields and write; a failure is said once."""
        with self._lock:
            self._content.update(fields)
            self._write()

    def hang(self, number: int, **fields: Any) -> None:
        """Change, or add, the entry of hang `number` (from 0)."""
        with self._lock:
            hangs = self._content["hangs"]
            if number == len(hangs):
                hangs.append({})
            hangs[number].update(fields)
            self._write()

    def resumed(self) -> None:
        """The ranks make progress again: the last hang is over."""
        with self._lock:
            hangs = self._content["hangs"]
            if hangs and hangs[-1].get("resumed_ns") is None:
                hangs[-1]["resumed_ns"] = time.time_ns()
                self._write()

    def finish(self, run_dir: Path, **fields: Any) -> None:
        """What is known at the end: world size and attempts from the ranks, memory kills."""
        worlds, attempts = [], [0]
        for path in sorted(run_dir.glob("ranks/*/meta.json")):
            try:
                meta = json.loads(path.read_text("utf-8"))
                worlds.append(int(meta["world_size"]))
                attempts.append(int(meta["attempt"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the reader of the run names what it cannot read
        now = cgroup.memory().oom_kills
        known = now is not None and self._kills is not None
        self.update(
            world_size=max(worlds, default=None),
            attempts=max(attempts) + 1,
            memory_kills=(now or 0) - (self._kills or 0) if known else None,
            **fields,
        )

    def _write(self) -> None:
        try:
            rundir.write_json(self._path, self._content)
        except OSError as wrong:
            voice.trouble("run.json could not be written", wrong)
