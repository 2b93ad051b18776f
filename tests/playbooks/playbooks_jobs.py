"""Jobs made up for tests of rules: tables as a run directory or as dumps would give them.

Times are in milliseconds from an arbitrary start. `Job.collected()` gives tables, shuffled on
request, since the order of rows must decide nothing.
"""

from __future__ import annotations

import random
from typing import Any

from collectors import schema
from collectors.collected import Collected, Source, empty

START = 1_790_000_000_000_000_000
MS = 1_000_000


def at(ms: float) -> int:
    """Nanoseconds of `ms` milliseconds after the start."""
    return START + round(ms * MS)


class Job:
    """Rows of every table, and run.json unless the job is loose."""

    def __init__(self, world: int, *, loose: bool = False, host: str = "node0") -> None:
        self.world = world
        self.host = host
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in schema.TABLES}
        self.run: dict[str, Any] = (
            {}
            if loose
            else {
                "schema": "diag.run/1",
                "name": "job",
                "state": "finished",
                "exit_code": 0,
                "interrupted": False,
                "world_size": world,
                "hangs": [],
            }
        )
        self.groups: dict[str, tuple[int, ...]] = {}
        if not loose:
            for rank in range(world):
                self.rank(rank)

    def rank(self, rank: int, **more: Any) -> None:
        """Add or change the row of `rank`."""
        row = next((r for r in self.rows["ranks"] if r["rank"] == rank), None)
        if row is None:
            row = {"rank": rank, "attempt": 0, "host": self.host, "pid": 1000 + rank}
            self.rows["ranks"].append(row)
        row.update(more)

    def group(self, axis: str, *ranks: int, declared: bool = True) -> str:
        """A process group; returns its id."""
        key = f"{axis}[{','.join(map(str, ranks))}]"
        if key not in self.groups:
            self.groups[key] = ranks
            self.rows["groups"].append(
                {
                    "group_id": key,
                    "name": axis,
                    "axis": axis,
                    "ranks": list(ranks) if declared else None,
                    "backend": "gloo",
                }
            )
        return key

    def call(
        self,
        rank: int,
        group: str,
        seq: int,
        issue: float,
        end: float | None = None,
        *,
        op: str = "all_reduce",
        state: str | None = None,
        **more: Any,
    ) -> None:
        """One rank's view of one operation; without `end` it is pending."""
        self.rows["collectives"].append(
            {
                "rank": rank,
                "group_id": group,
                "seq": seq,
                "op": op,
                "dtype": "float32",
                "shape": "[128]",
                "bytes_in": 512,
                "bytes_out": 512,
                "issue_ns": at(issue),
                "end_ns": None if end is None else at(end),
                "state": state or ("issued" if end is None else "completed"),
                "source": f"ranks/{rank:05d}",
                "locator": f"record {seq}",
                "p2p": op in ("send", "recv"),
                **more,
            }
        )

    def step(self, rank: int, step: int, start: float, end: float | None, **more: Any) -> None:
        """A training step."""
        ends = None if end is None else at(end)
        self.rows["steps"].append(
            {"rank": rank, "step": step, "start_ns": at(start), "end_ns": ends, **more}
        )

    def phase(
        self, rank: int, step: int, name: str, start: float, end: float | None, **more: Any
    ) -> None:
        """A phase; open without `end`."""
        self.rows["phases"].append(
            {
                "rank": rank,
                "step": step,
                "phase": name,
                "start_ns": at(start),
                "end_ns": None if end is None else at(end),
                **more,
            }
        )

    def stack(self, rank: int, look: int, *frames: str) -> None:
        """The main thread of a rank at one look, innermost frame first."""
        self.rows["stacks"].append(
            {
                "look": look,
                "rank": rank,
                "thread": "MainThread",
                "main": True,
                "frames": list(frames),
                "state": "idle",
                "source": f"captures/0001-hang/stacks-{look}.json",
                "locator": f"rank {rank}, thread MainThread",
            }
        )

    def hang(self, since: float, detected: float) -> None:
        """What supervision wrote when nothing moved."""
        self.run["hangs"].append(
            {
                "since_ns": at(since),
                "detected_ns": at(detected),
                "hang_after_s": (detected - since) / 1e3,
                "capture": "captures/0001-hang",
                "verdict_ns": at(detected + 50),
            }
        )

    def died(self, rank: int, when: float, **how: Any) -> None:
        """A process end as exits.jsonl has it: signal=9, exit_code=1."""
        self.rank(rank, ended_ns=at(when), **how)

    def raised(self, rank: int, when: float, text: str, traceback: str = "") -> None:
        """An uncaught exception, with its exit code."""
        self.rank(
            rank,
            exception=text,
            exception_ns=at(when),
            traceback=traceback,
            ended_ns=at(when + 100),
            exit_code=1,
        )

    def failed(self, exit_code: int = 1) -> None:
        """The job as a whole ended with a code."""
        self.run["exit_code"] = exit_code

    def collected(self, shuffle: int | None = None) -> Collected:
        """Tables; rows in the order of `shuffle`, a seed."""
        out = empty()
        for name, rows in self.rows.items():
            some = list(rows)
            if shuffle is not None:
                random.Random(f"{shuffle} {name}").shuffle(some)
            out.tables[name] = schema.table(name, some)
        out.run = dict(self.run)
        out.world_size = self.world
        out.sources.append(Source("run.json" if self.run else "dumps", "run", "all"))
        return out


GLOO_CLOSED = (
    "builtins.RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
    "closed by peer [127.0.0.1]:3423. This is typically caused by a remote worker crashing."
)


def ddp(
    world: int = 4,
    steps: int = 20,
    *,
    slow: dict[int, float] | None = None,
    slow_data: dict[int, float] | None = None,
    since: int = 0,
    data: float = 2.0,
    job: Job | None = None,
) -> Job:
    """A data-parallel job of 100 ms steps whose backward hides the wait for the slowest rank.

    `slow` adds milliseconds to a rank's forward, `slow_data` to its data phase, from step `since`.
    Two buckets a step are issued during backward and waited for at its end, as DDP does.
    """
    job = job or Job(world)
    group = job.group("dp", *range(world))
    clock = 0.0
    for step in range(steps):
        on = step >= since
        loads = {r: data + ((slow_data or {}).get(r, 0.0) if on else 0.0) for r in range(world)}
        compute = {r: 40.0 + ((slow or {}).get(r, 0.0) if on else 0.0) for r in range(world)}
        forward = {r: clock + loads[r] + compute[r] for r in range(world)}
        first = {r: forward[r] + 10 + r * 0.1 for r in range(world)}
        second = {r: forward[r] + 30 + r * 0.1 for r in range(world)}
        done_first = max(first.values()) + 2
        done = max(max(second.values()) + 2, done_first)
        end = done + 5
        for r in range(world):
            job.step(r, step, clock, end, tokens=4096.0, loss=5.0 - step * 0.01)
            job.phase(r, step, "data", clock, clock + loads[r])
            job.phase(r, step, "forward", clock + loads[r], forward[r])
            job.phase(r, step, "backward", forward[r], done)
            job.phase(r, step, "optimizer", done, end - 1)
            job.call(r, group, 2 * step, first[r], done_first, step=step)
            job.call(r, group, 2 * step + 1, second[r], done, step=step)
        clock = end
    return job


def mesh(steps: int = 20, *, slow: int | None = None, extra: float = 60.0, since: int = 0) -> Job:
    """Four ranks as pp=2, tp=2: tp collectives in each stage, sends from stage 0 to stage 1.

    Ranks 0 and 1 are stage 0, ranks 2 and 3 stage 1. `slow` computes `extra` ms longer a step.
    """
    job = Job(4)
    for rank in range(4):
        job.rank(rank, pp=rank // 2, tp=rank % 2)
    tp = {0: job.group("tp", 0, 1), 2: job.group("tp", 2, 3)}
    pp = {0: job.group("pp", 0, 2), 1: job.group("pp", 1, 3)}
    clock = 0.0
    for step in range(steps):
        late = {r: extra if r == slow and step >= since else 0.0 for r in range(4)}
        # Stage 0 computes, meets in tp, sends; stage 1 receives, computes, meets in tp.
        ready = {r: clock + 30 + late[r] for r in (0, 1)}
        met = max(ready.values()) + 1
        sent = dict.fromkeys((0, 1), met + 2)
        got = {r: sent[r - 2] + 1 for r in (2, 3)}
        ready |= {r: got[r] + 30 + late[r] for r in (2, 3)}
        met_late = max(ready[2], ready[3]) + 1
        end = met_late + 5
        for r in range(4):
            stage = r // 2
            job.step(r, step, clock, end, tokens=512.0, loss=4.0)
            done = met if stage == 0 else met_late
            wait = round((done - ready[r]) * MS)
            job.call(r, tp[2 * stage], step, ready[r], done, step=step, wait_ns=wait)
        for r in (0, 1):
            job.phase(r, step, "forward", clock, sent[r], stage=0, microbatch=0)
            job.call(r, pp[r], step, sent[r], got[r + 2], op="send", peer=r + 2, wait_ns=0)
            # The last stage's gradient comes back at the end of the step.
            job.call(
                r, pp[r], step, sent[r] + 1, end - 3, op="recv", peer=r + 2, step=step,
                wait_ns=round((end - 3 - sent[r] - 1) * MS),
            )  # fmt: skip
            job.phase(r, step, "communication", sent[r], end - 3, stage=0, microbatch=0)
        for r in (2, 3):
            wait = round((got[r] - clock) * MS)
            job.call(
                r, pp[r - 2], step, clock, got[r], op="recv", peer=r - 2, step=step, wait_ns=wait
            )
            job.call(r, pp[r - 2], step, end - 4, end - 3, op="send", peer=r - 2, wait_ns=0)
            job.phase(r, step, "communication", clock, got[r], stage=1, microbatch=0)
            job.phase(r, step, "forward", got[r], end - 4, stage=1, microbatch=0)
        clock = end
    return job
