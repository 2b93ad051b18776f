"""Runs that never ran: tables, reports and topologies with known content."""

from __future__ import annotations

from typing import Any

from collectors.collected import Collected, Source, empty
from collectors.schema import table
from collectors.topology.graph import Gpu, Link, Nic, Topology
from collectors.topology.plan import parse_plan
from playbooks.finding import Abstention, Finding, Item
from playbooks.report.model import Coverage, Health, Report

T0 = 1_790_000_000_000_000_000
MS = 1_000_000
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>&amp;\''


def healthy(ranks: int = 4, steps: int = 20, slow: int | None = None) -> Collected:
    """`ranks` ranks, each step 100 ms: data 5, forward 30, backward 45, optimizer 10, gap 10.

    Forward has two tp collectives and backward one dp collective; `slow` computes twice as long.
    """
    rows: dict[str, list[dict[str, Any]]] = {n: [] for n in ("steps", "phases", "collectives")}
    for rank in range(ranks):
        tp = f"tp{rank // 2}"
        for step in range(steps):
            begin = T0 + step * 100 * MS + rank * MS // 10
            own = {"rank": rank, "step": step}
            rows["steps"].append(
                {
                    **own,
                    "start_ns": begin,
                    "end_ns": begin + 100 * MS,
                    "tokens": 4096.0,
                    "loss": 5.0 * 0.95**step if rank == ranks - 1 else None,
                }
            )
            at = begin
            for phase, took in (("data", 5), ("forward", 30), ("backward", 45), ("optimizer", 10)):
                spent = took * (2 if rank == slow and phase == "forward" else 1)
                end = at + spent * MS
                rows["phases"].append(
                    {**own, "phase": phase, "start_ns": at, "end_ns": end, "microbatch": 0}
                )
                if phase in {"forward", "backward"}:
                    group = tp if phase == "forward" else "dp"
                    rows["collectives"].append(
                        {
                            **own,
                            "group_id": group,
                            "seq": step,
                            "op": "all_reduce",
                            "dtype": "float32",
                            "shape": "[1024]",
                            "bytes_in": 4096,
                            "issue_ns": at + 2 * MS,
                            "start_ns": at + 2 * MS,
                            "end_ns": at + 6 * MS,
                            "wait_ns": 4 * MS,
                            "state": "completed",
                            "p2p": False,
                        }
                    )
                at = end
    out = empty()
    for name, some in rows.items():
        out.tables[name] = table(name, some)
    pairs = range(0, ranks, 2)
    out.tables["groups"] = table(
        "groups",
        [
            *(
                {"group_id": f"tp{i // 2}", "name": "tp", "axis": "tp", "ranks": [i, i + 1]}
                for i in pairs
            ),
            {"group_id": "dp", "name": "dp", "axis": "dp", "ranks": list(range(ranks))},
        ],
    )
    out.tables["ranks"] = table(
        "ranks",
        [{"rank": r, "host": "node0", "pid": 100 + r, "device": "cpu"} for r in range(ranks)],
    )
    out.sources = [
        Source(f"ranks/{r:05d}/flight-00.bin", "flight-log", "all") for r in range(ranks)
    ]
    out.world_size = ranks
    out.run = {
        "schema": "diag.run/1",
        "name": "small",
        "command": ["torchrun", "--nproc-per-node", str(ranks), "-m", "trainer"],
        "cwd": "/home/me/train",
        "host": "node0",
        "started_ns": T0,
        "ended_ns": T0 + steps * 100 * MS,
        "state": "finished",
        "exit_code": 0,
        "signal": None,
        "world_size": ranks,
        "versions": {"diag": "0.1.0", "python": "3.13", "torch": "2.14"},
        "env": {"set": {"TORCH_FR_BUFFER_SIZE": "2000"}, "kept": []},
        "agent": {"enabled": True, "problems": []},
    }
    return out


def stalled() -> Collected:
    """Rank 1 is stuck reading data in its last step while the others wait in a dp collective."""
    out = healthy()
    last = T0 + 2000 * MS
    phases = out.rows("phases")
    operations = out.rows("collectives")
    for rank in range(4):
        open_phase = "data" if rank == 1 else "backward"
        phases.append({"rank": rank, "step": 20, "phase": open_phase, "start_ns": last})
        if rank != 1:
            operations.append(
                {
                    "rank": rank,
                    "step": 20,
                    "group_id": "dp",
                    "seq": 20,
                    "op": "all_reduce",
                    "issue_ns": last + 40 * MS,
                    "state": "started",
                }
            )
    operations.append(
        {
            "rank": 0,
            "step": 20,
            "group_id": "dp",
            "seq": 21,
            "op": "barrier",
            "issue_ns": last + 400 * MS,
            "end_ns": last + 900 * MS,
            "state": "failed",
        }
    )
    out.tables["phases"] = table("phases", phases)
    out.tables["collectives"] = table("collectives", operations)
    out.sources.append(
        Source("captures/0001-hang/stacks-0.json", "stacks", "part", ("rank 3 did not answer",))
    )
    return out


def hostile() -> Collected:
    """Every foreign string is an attempt to run a script."""
    out = stalled()
    phases = out.rows("phases")
    phases[0]["phase"] = HOSTILE
    out.tables["phases"] = table("phases", phases)
    operations = out.rows("collectives")
    for row in operations:
        row["op"] = HOSTILE
        row["shape"] = HOSTILE
    out.tables["collectives"] = table("collectives", operations)
    out.tables["groups"] = table(
        "groups", [{"group_id": "dp", "name": HOSTILE, "axis": HOSTILE, "ranks": [0, 1, 2, 3]}]
    )
    out.run.update(name=HOSTILE, command=["python", HOSTILE], host=HOSTILE, cwd=HOSTILE)
    out.run["versions"] = {HOSTILE: HOSTILE}
    out.run["agent"] = {"enabled": True, "problems": [HOSTILE]}
    out.sources.append(Source(HOSTILE, HOSTILE, "none", (HOSTILE,)))
    out.topologies = [node(HOSTILE, HOSTILE)]
    return out


def node(host: str = "node0", model: str = "H100", gpus: int = 8, nics: int = 4) -> Topology:
    """A node with NVLink between all GPUs and a NIC behind a PCIe switch for every two."""
    cards = tuple(Gpu(f"GPU{i}", i, model, i // 4) for i in range(gpus))
    ports = tuple(Nic(f"NIC{i}", f"mlx5_{i}", 50e9, "active") for i in range(nics))
    links = [
        Link(a.name, b.name, "nvlink", 18, 450e9)
        for i, a in enumerate(cards)
        for b in cards[i + 1 :]
    ]
    links += [
        Link(nic.name, gpu.name, "pcie-switch" if gpu.index // 2 == i else "socket")
        for i, nic in enumerate(ports)
        for gpu in cards
    ]
    return Topology(host, cards, ports, tuple(links), "topo.txt")


def placed() -> Collected:
    """A healthy run on two nodes of eight GPUs, with its plan."""
    out = healthy(ranks=16, steps=10)
    out.topologies = [node("node0"), node("node1")]
    out.plan = parse_plan(
        {
            "world": 16,
            "nodes": 2,
            "gpus_per_node": 8,
            "order": ["pp", "dp", "tp"],
            "tp": 4,
            "dp": 2,
            "pp": 2,
        },
        "plan.yaml",
    )
    return out


def coverage(collected: Collected) -> Coverage:
    world = collected.world_size
    return Coverage(world, tuple(range(world or 0)), (), tuple(collected.sources))


def report_for(collected: Collected) -> Report:
    """By hand: a verdict for a run with open phases, health when there are steps, else none."""
    name = str(collected.run.get("name", ""))
    phases = collected.rows("phases")
    if any(p["end_ns"] is None for p in phases):
        found = stall(HOSTILE if name == HOSTILE else "")
        effect = Finding(
            "hang.transport",
            "effect",
            "likely",
            "Ranks 0, 2 and 3 wait in all_reduce #20.",
            caused_by=found.cause,
        )
        context = Finding(
            "slow.straggler-input",
            "context",
            "possible",
            "Reading took 5 ms a step before.",
            evidence=(Item("ranks/00001/flight-00.bin", "record 812", "data: 5.0 ms"),),
        )
        return Report(
            found,
            (found, effect, context),
            None,
            None,
            {"step_time_s": 0.1},
            coverage(collected),
            {found.cause: "A living rank sits in CPU code and does not reach the collective"},
        )
    if not collected.rows("steps"):
        need = ("a run directory of `diag run`",)
        return Report(
            None, (), Abstention("Nothing was recorded.", need), None, {}, coverage(collected), {}
        )
    health = Health("20 steps on 4 ranks, nothing wrong in what was seen.", {"step_time_s": 0.1})
    return Report(
        None,
        (),
        None,
        health,
        {"step_time_s": 0.1, "tokens_per_s": 40960.0, "mfu": None},
        coverage(collected),
        {},
    )


def stall(extra: str = "") -> Finding:
    return Finding(
        "hang.rank-stalled",
        "root",
        "certain",
        f"Rank 1 is stuck reading its data; the other 3 ranks wait for it.{extra}",
        ranks=(1,),
        group="dp[0..3]",
        axis="dp",
        where="data",
        evidence=(
            Item("ledger", "dp #20", f"rank 1 last finished all_reduce #19 at 14:02:07.3{extra}"),
            Item(
                "captures/0001-hang/stacks-0.json",
                "rank 1, MainThread",
                f"its main thread is in loader.py:88 read_shard -> open(){extra}",
            ),
        ),
        excluded=(("hang.slow-not-dead", f"the same frame in both looks{extra}"),),
        advice=(
            f"Look at the file system of /mnt/data on node0 (nfsstat, dmesg).{extra}",
            "Give the loader a timeout: DataLoader(..., timeout=60).",
        ),
        formula=f"1 of 4 ranks below seq 20{extra}",
        at_ns=T0 + 2000 * MS,
    )
