"""What being watched costs a job: the same job with and without `diag run`, side by side.

(a) DDP steps on 2 ranks, (b) tiny collectives on 2 ranks, (c) the bundled trainer on 4 ranks, and
the bare cost of one record. Also how much the flight log grows. All on CPU and gloo.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from diag import demo
from diag.bench.rows import Row, interval, paired

_JOBS = Path(__file__).with_name("jobs.py")
_FINISHED = re.compile(r"^finished (\d+) steps in ([\d.]+) s", re.MULTILINE)


def _torchrun(ranks: int, *words: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", *words]


def _output(command: list[str], run_dir: Path | None) -> str:
    """What the job prints, plain or under `diag run`; CalledProcessError when it fails."""
    if run_dir is not None:
        command = [sys.executable, "-m", "diag", "run", "--run-dir", str(run_dir), "--", *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return done.stdout


def _figures(command: list[str], run_dir: Path | None) -> tuple[float, float]:
    """(wall, CPU) seconds that the job printed."""
    lines = [line for line in _output(command, run_dir).splitlines() if line.startswith("{")]
    body = json.loads(lines[-1])
    return float(body["seconds"]), float(body["cpu"])


def _trainer(run_dir: Path | None) -> float:
    """Seconds a step of the bundled trainer."""
    command = demo.job(demo.place(demo.CASES["healthy"], {"tp": 2, "pp": 2}, 0))
    found = _FINISHED.search(_output(command, run_dir))
    if found is None:
        raise ValueError("the trainer did not say how long its steps took")
    return float(found[2]) / int(found[1])


def _record(scratch: Path) -> float:
    """Seconds to write and complete one record."""
    from collectors.agent import flight

    directory = scratch / "record"
    directory.mkdir()
    writer = flight.Writer(directory, {"rank": 0})
    name = writer.name("all_reduce")
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for number in range(20_000):
            writer.finish(writer.put(flight.COLLECTIVE, name, number, seq=number), number)
        best = min(best, (time.perf_counter() - start) / 20_000)
    return best


def _log_size(run_dir: Path) -> tuple[int, int]:
    """(bytes of records, steps) of rank 0 of a run."""
    from collectors.agent import flight

    log = flight.read(run_dir / "ranks" / "00000")
    steps = int((log.records["kind"] == flight.STEP).sum())
    return len(log.records) * flight.SIZE, steps


def _ddp(scratch: Path, rounds: int) -> list[Row]:
    command = _torchrun(2, str(_JOBS), "steps", "60", "640")
    pairs = paired(
        lambda: _figures(command, None), lambda: _figures(command, scratch / "ddp"), rounds
    )
    return [
        Row("2-rank DDP step, plain", interval([wall for wall, _ in pairs[0]])[0] * 1e3, "ms"),
        _percent("2-rank DDP step, cost", [w for w, _ in pairs[0]], [w for w, _ in pairs[1]]),
        _percent("2-rank DDP step, CPU cost", [c for _, c in pairs[0]], [c for _, c in pairs[1]]),
    ]


def _tiny(scratch: Path, rounds: int) -> list[Row]:
    command = _torchrun(2, str(_JOBS), "small", "3000")
    plain, under = paired(
        lambda: _figures(command, None), lambda: _figures(command, scratch / "small"), rounds
    )
    out = [Row("tiny all_reduce, plain", interval([wall for wall, _ in plain])[0] * 1e6, "us")]
    for place, name in enumerate(("cost", "CPU cost")):
        added = [1e6 * (b[place] - a[place]) for a, b in zip(plain, under, strict=True)]
        middle, low, high = interval(added)
        out.append(Row(f"tiny all_reduce, {name}", middle, "us", low, high, goal=5.0))
    return out


def measure(rounds: int) -> list[Row]:
    """All rows; takes some minutes."""
    with tempfile.TemporaryDirectory(prefix="diag-bench-") as folder:
        scratch = Path(folder)
        rows = [Row("one record, written and completed", _record(scratch) * 1e6, "us")]
        rows += _ddp(scratch, rounds)
        rows += _tiny(scratch, rounds)
        plain, under = paired(lambda: _trainer(None), lambda: _trainer(scratch / "trainer"), rounds)
        rows.append(Row("4-rank trainer step, plain", interval(plain)[0] * 1e3, "ms"))
        rows.append(_percent("4-rank trainer step, cost", plain, under))
        for name in ("ddp", "trainer"):
            size, steps = _log_size(scratch / name)
            rows.append(Row(f"flight log a rank and 1000 steps, {name}", size / steps / 1e3, "MB"))
    return rows


def _percent(case: str, plain: list[float], under: list[float]) -> Row:
    """By how much the watched one of each pair is longer."""
    added = [100 * (b / a - 1) for a, b in zip(plain, under, strict=True)]
    middle, low, high = interval(added)
    return Row(case, middle, "%", low, high, goal=1.0)
