"""All that rules share about one job: Collected with views that are worked out once.

In: Collected. Out: ends of processes, raised exceptions, groups, the ledger, who waits for whom,
step and phase matrices, stacks. Pure: reads nothing, decides nothing; a rule decides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks import knowledge, logs, resuming
from playbooks.breakdown import Breakdown
from playbooks.facts import End, Group, Raised, Stack, is_diag, worker_error
from playbooks.finding import Item
from playbooks.ledger import Ledger
from playbooks.lines import Lines
from playbooks.measures.view import Measures
from playbooks.nccl import Nccl
from playbooks.settings import Settings
from playbooks.story import Story
from playbooks.timeline import OpenPhase, Timeline
from playbooks.waiting import WaitGraph, wait_graph

if TYPE_CHECKING:
    from collectors.collected import Collected


class Evidence:
    """Views of one Collected; build it once for each diagnosis."""

    def __init__(self, collected: Collected) -> None:
        self.collected = collected
        self.run: dict[str, Any] = collected.run

    # --- the job ----------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether a run directory says that the job still runs."""
        return self.run.get("state") == "running"

    @property
    def finished_well(self) -> bool:
        """Whether a run directory says that the job ended with exit code 0."""
        return self.run.get("state") == "finished" and self.run.get("exit_code") == 0

    @property
    def interrupted(self) -> bool:
        """Whether a person or launcher ended the whole job through diag."""
        return bool(self.run.get("interrupted"))

    @cached_property
    def hang(self) -> dict[str, Any] | None:
        """The last stretch without progress that supervision saw, None when there was none."""
        found = [h for h in self.run.get("hangs") or [] if isinstance(h, dict)]
        return found[-1] if found else None

    @cached_property
    def resumed_ns(self) -> int | None:
        """When the job went on after that stretch was seen; None when it never did."""
        return resuming.resumed_ns(self)

    @property
    def stopped(self) -> bool:
        """Whether the job was seen to make no progress, and never went on."""
        if self.hang is not None:
            return self.resumed_ns is None
        return self.loose and bool(self.ledger.unfinished(None).any())

    @cached_property
    def story(self) -> Story:
        """What the log lines tell over time."""
        return Story(self)

    @cached_property
    def lines(self) -> Lines:
        """Recognised log lines by kind."""
        return Lines(self.collected)

    @cached_property
    def measures(self) -> Measures:
        """Numbers, digests and ids that programs printed in words of their own."""
        return Measures(self)

    @cached_property
    def breakdown(self) -> Breakdown:
        """Phases of steps as lines and tables tell them."""
        return Breakdown(self.lines)

    @cached_property
    def settings(self) -> Settings:
        """What the job was set to do, as far as any line tells."""
        return Settings(self.lines)

    @cached_property
    def nccl(self) -> Nccl:
        """What NCCL's logs say of processes, networks and channels."""
        return Nccl(self.lines)

    @property
    def loose(self) -> bool:
        """Whether the source is loose artifacts instead of a run directory."""
        return not self.run

    @cached_property
    def hang_items(self) -> list[Item]:
        """What supervision recorded about the stretch without progress."""
        if self.hang is None:
            return []
        after = self.hang.get("hang_after_s")
        since = f"no rank made progress for {after} s" if after is not None else "no progress"
        return [Item("run.json", "hangs", since)]

    # --- ranks ------------------------------------------------------------------------------

    @cached_property
    def rank_rows(self) -> dict[int, dict[str, Any]]:
        """The ranks table: the last attempt of each rank."""
        out: dict[int, dict[str, Any]] = {}
        for row in self.collected.rows("ranks"):
            rank = row["rank"]
            if rank is None:
                continue
            known = out.get(rank)
            if known is None or (row["attempt"] or 0) >= (known["attempt"] or 0):
                out[rank] = row
        return out

    @cached_property
    def seen(self) -> frozenset[int]:
        """Ranks that left anything anywhere."""
        found = set(self.rank_rows)
        for table in ("steps", "phases", "collectives", "stacks", "memory", "log_events"):
            ranks = self.collected.ints(table, "rank")
            found.update(int(r) for r in np.unique(ranks[ranks >= 0]))
        return frozenset(found)

    @cached_property
    def world_size(self) -> int | None:
        """As the sources say, else one more than the highest rank of any declared group."""
        told = self.collected.world_size or self.run.get("world_size")
        if told:
            return int(told)
        declared = [max(g.members) for g in self.groups.values() if g.declared and g.members]
        return max(declared) + 1 if declared else None

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the world that left nothing."""
        return tuple(r for r in range(self.world_size or 0) if r not in self.seen)

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Host of each rank that is known to run on one."""
        return {r: row["host"] for r, row in self.rank_rows.items() if row["host"]}

    @cached_property
    def ends(self) -> list[End]:
        """Every process that is known to have ended, earliest first, unknown times last."""
        found = {} if self.run else {end.rank: end for end in logs.ends(self.collected)}
        for rank, row in self.rank_rows.items():
            known = row["signal"] is not None or row["exit_code"] is not None
            if rank in found or not (known or row["ended_ns"] is not None):
                continue
            end = End(
                rank,
                row["signal"],
                row["exit_code"],
                row["ended_ns"],
                row["closed"],
                row["host"],
            )
            source = "exits.jsonl" if self.run else "launcher"
            found[rank] = replace(
                end, item=Item(source, f"rank {rank}", f"rank {rank} ended with {end.words}")
            )
        for end in logs.ends(self.collected):
            found.setdefault(end.rank, end)
        return sorted(found.values(), key=lambda e: (e.at_ns is None, e.at_ns or 0, e.rank))

    @cached_property
    def raised(self) -> list[Raised]:
        """Every exception that ended a process, earliest first."""
        found = []
        for rank, row in self.rank_rows.items():
            if row["exception"]:
                full = " ".join(row["exception"].split()).removeprefix("builtins.")
                text = worker_error(row["exception"]) or full
                found.append(
                    Raised(
                        rank,
                        knowledge.classify(full),
                        text,
                        row["traceback"] or "",
                        row["exception_ns"] or row["ended_ns"],
                        row["host"],
                        Item(f"ranks/{rank:05d}", "exception.json", text[:300]),
                    )
                )
        told: set[int | None] = {r.rank for r in found}
        if not self.loose and found:
            told.add(None)  # what a job printed without a rank is what its ranks raised
        found.extend(r for r in logs.raised(self.collected) if r.rank not in told)
        return sorted(found, key=lambda r: (r.at_ns is None, r.at_ns or 0, r.rank or 0))

    @property
    def hang_ns(self) -> int | None:
        """The moment at which supervision saw that nothing moved; None when it saw none."""
        seen = (self.hang or {}).get("detected_ns")
        return int(seen) if seen and self.resumed_ns is None else None

    @cached_property
    def gone(self) -> frozenset[int]:
        """Ranks whose process had ended before the job was seen to stand still (or at all)."""
        seen = self.hang_ns
        return frozenset(
            e.rank for e in self.ends if seen is None or (e.at_ns is not None and e.at_ns <= seen)
        )

    @cached_property
    def open_phases(self) -> dict[int, OpenPhase]:
        """The phase in which each rank was when the job stood still, or at the end of the log."""
        return self.timeline.open(self.hang_ns)

    # --- communication ----------------------------------------------------------------------

    @cached_property
    def ledger(self) -> Ledger:
        """All ranks' views of every collective."""
        return Ledger(self.collected)

    @cached_property
    def groups(self) -> dict[int, Group]:
        """Group of each code of the ledger."""
        told = {row["group_id"]: row for row in self.collected.rows("groups")}
        out = {}
        for code, identifier in enumerate(self.ledger.group_ids):
            row = told.get(identifier) or {}
            members = tuple(row.get("ranks") or ())
            declared = bool(members)
            if not declared:
                ranks = self.ledger.rank[self.ledger.group == code]
                members = tuple(int(r) for r in np.unique(ranks[ranks >= 0]))
            out[code] = Group(
                identifier, row.get("axis") or "unknown", members, declared, row.get("backend")
            )
        return out

    @cached_property
    def waits(self) -> WaitGraph:
        """Who waited for whom when the job stood still, or at the end of the records."""
        members = {code: group.members for code, group in self.groups.items()}
        gone = self.gone if self.hang_ns is not None else ()
        return wait_graph(self.ledger, members, gone, self.hang_ns)

    # --- time -------------------------------------------------------------------------------

    @cached_property
    def timeline(self) -> Timeline:
        """Steps and phases as matrices."""
        device = [c for c, g in self.groups.items() if g.backend and "nccl" in g.backend.lower()]
        return Timeline(self.collected, self.ledger, device)

    @cached_property
    def stages(self) -> dict[int, int]:
        """Pipeline stage of each rank, from mesh coordinates, else from its phases."""
        told = {r: row["pp"] for r, row in self.rank_rows.items() if row["pp"] is not None}
        if told:
            return told
        rank = self.collected.ints("phases", "rank")
        stage = self.collected.ints("phases", "stage")
        known = (rank >= 0) & (stage >= 0)
        pairs = np.unique(np.stack([rank[known], stage[known]]), axis=1).T if known.any() else ()
        return {int(r): int(s) for r, s in pairs}

    @cached_property
    def stacks(self) -> dict[int, list[Stack]]:
        """The main thread of each rank, one entry a look, in order of looks."""
        out: dict[int, dict[int, Stack]] = {}
        for row in self.collected.rows("stacks"):
            if row["rank"] is None or not row["frames"] or row["main"] is False:
                continue
            frames = tuple(f for f in row["frames"] if not is_diag(f))
            if (
                not frames or row["state"] == "issuing"
            ):  # where a collective was issued, not where the rank is
                continue
            stack = Stack(
                frames,
                row["state"],
                Item(
                    row["source"] or "stacks",
                    row["locator"] or f"rank {row['rank']}",
                    frames[0],
                ),
                row["time_ns"],
                row["cpu_share"],
            )
            looks = out.setdefault(row["rank"], {})
            if row["look"] is not None or not looks:
                looks[row["look"] or 0] = stack
        return {rank: [looks[k] for k in sorted(looks)] for rank, looks in out.items()}
