"""What logs tell of a job over time: who timed out where, who counts on, who fell silent.

In: Evidence. Out: waits by rank (from watchdog lines), progress of counters, ends of epochs, times
of the last step. Pure; times are those of the pile's lines, and are compared only within it.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playbooks.evidence import Evidence

MS = 1_000_000
_TIMEOUTS = ("nccl.timeout", "nccl.watchdog-terminated")
_FAILURES = (
    "nccl.",
    "gloo.",
    "elastic.",
    "python.exception",
    "process.",
    "store.",
    "mpi.",
    "deepspeed.exit",
    "deepspeed.kill",
    "slurm.task-exit",
    "slurm.cancelled",
)
_NO_FAILURE = ("nccl.version", "nccl.dump", "elastic.restart", "store.retry", "nccl.init")


@dataclass(frozen=True)
class Timeout:
    """One rank's own watchdog line about the operation in which it waited."""

    rank: int
    group: str | None
    seq: int | None
    op: str
    size: int | None
    limit_ms: int | None
    ran_ms: int | None
    at_ns: int | None
    row: dict[str, Any]

    @property
    def since_ns(self) -> int | None:
        """When it began to wait."""
        if self.at_ns is None:
            return None
        return self.at_ns - (self.ran_ms or self.limit_ms or 0) * MS


@dataclass(frozen=True)
class Count:
    """One line in which a rank counts."""

    at_ns: int | None
    done: float
    total: float | None
    row: dict[str, Any]
    place: int
    """Order within its file."""


class Story:
    """Views of the log lines of one pile; built once for each diagnosis."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.rows = [r for r in evidence.collected.rows("log_events") if r["kind"]]

    def of(self, *kinds: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(row, fields) of these kinds, in the order of files and lines."""
        out = []
        for row in self.rows:
            if row["kind"] in kinds:
                try:
                    fields = json.loads(row["fields"] or "{}")
                except ValueError:
                    fields = {}
                out.append((row, fields if isinstance(fields, dict) else {}))
        return out

    @cached_property
    def timeouts(self) -> dict[int, Timeout]:
        """First timeout of each rank."""
        out: dict[int, Timeout] = {}
        for row, fields in self.of(*_TIMEOUTS):
            rank, seq = row["rank"], fields.get("seq")
            if rank is None or seq is None or rank in out:
                continue
            out[rank] = Timeout(
                rank,
                fields.get("pg") or fields.get("pg_id"),
                seq,
                str(fields.get("op") or "unknown"),
                fields.get("numel_in"),
                fields.get("timeout_ms"),
                fields.get("ran_ms"),
                row["time_ns"] if row["time_ns"] is not None else self._before(row),
                row,
            )
        return out

    def _before(self, row: dict[str, Any]) -> int | None:
        """The last time that a line before `row` in its file states: old glog lines have none."""
        return self._times_before.get((row["source"], row["locator"]))

    @cached_property
    def _times_before(self) -> dict[tuple[str, str], int]:
        last: dict[str, int] = {}
        out: dict[tuple[str, str], int] = {}
        for row in self.rows:
            if row["time_ns"] is not None:
                last[row["source"]] = row["time_ns"]
            elif row["source"] in last:
                out[(row["source"], row["locator"])] = last[row["source"]]
        return out

    @cached_property
    def waiting(self) -> dict[int, Timeout]:
        """The timeouts at the operation in which most ranks waited."""
        found = Counter(t.seq for t in self.timeouts.values())
        if not found:
            return {}
        seq, _ = found.most_common(1)[0]
        return {r: t for r, t in self.timeouts.items() if t.seq == seq}

    @cached_property
    def since_ns(self) -> int | None:
        """When the first of the waiting ranks began to wait."""
        times = [t.since_ns for t in self.waiting.values() if t.since_ns is not None]
        return min(times) if times else None

    @cached_property
    def expired_ns(self) -> int | None:
        """When the first timeout expired."""
        times = [t.at_ns for t in self.waiting.values() if t.at_ns is not None]
        return min(times) if times else None

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks of the job, as far as known."""
        return self.evidence.seen | frozenset(range(self.evidence.world_size or 0))

    @cached_property
    def absent(self) -> frozenset[int]:
        """Ranks that printed no timeout while others did."""
        return self.ranks - frozenset(self.timeouts) if self.timeouts else frozenset()

    @cached_property
    def counts(self) -> dict[int, list[Count]]:
        """Counters and steps of each rank that names itself, the last run of one kind of line."""
        out: dict[tuple[int, str], list[Count]] = {}
        for place, (row, fields) in enumerate(self.of("rank.progress", "train.step")):
            done = fields.get("done", fields.get("step"))
            if row["rank"] is None or not isinstance(done, int | float):
                continue
            what = str(fields.get("what") or "step")
            count = Count(row["time_ns"], float(done), fields.get("total"), row, place)
            out.setdefault((row["rank"], what), []).append(count)
        best: dict[int, list[Count]] = {}
        for (rank, _what), found in out.items():
            if rank not in best or found[-1].place > best[rank][-1].place:
                best[rank] = found
        return best

    @cached_property
    def steps(self) -> list[tuple[int, int, dict[str, Any]]]:
        """(time, step, row) of progress lines with a time, in order of time."""
        found = [
            (row["time_ns"], fields["step"], row)
            for row, fields in self.of("train.step")
            if row["time_ns"] is not None and isinstance(fields.get("step"), int)
        ]
        return sorted(found, key=lambda f: (f[0], f[1]))

    @cached_property
    def step_gap_ns(self) -> int | None:
        """Usual time between two progress lines; None with fewer than three."""
        times = sorted({t for t, _, _ in self.steps})
        gaps = sorted(b - a for a, b in itertools.pairwise(times) if b > a)
        return gaps[len(gaps) // 2] if len(gaps) >= 2 else None

    @cached_property
    def failures(self) -> list[dict[str, Any]]:
        """Lines of failures with a time, earliest first."""
        found = [
            row
            for row in self.rows
            if row["time_ns"] is not None
            and row["kind"].startswith(_FAILURES)
            and not row["kind"].startswith(_NO_FAILURE)
        ]
        return sorted(found, key=lambda r: int(r["time_ns"]))

    @cached_property
    def pids(self) -> dict[int, int | None]:
        """Every process id that belongs to this job -> its rank where that is known."""
        out: dict[int, int | None] = {}
        for row, fields in self.of(*_OWN_PIDS):
            pid = fields.get("pid")
            if isinstance(pid, int):
                out.setdefault(pid, row["rank"])
        for rank, row in self.evidence.rank_rows.items():
            if row["pid"] is not None:
                out[row["pid"]] = rank
        return out


_OWN_PIDS = (
    "rank.pid",
    "deepspeed.spawned",
    "deepspeed.kill",
    "elastic.signal-sent",
    "elastic.worker-exit",
    "elastic.failure",
    "nccl-info.comm",
)
