"""A run directory as tables: live or finished, whole or damaged.

In: the directory that `diag run` writes (see architecture). Out: one Collected, with a Source for
every part and a problem for every part that could not be read. `compact` keeps the tables as
Parquet, which later readings (and other programs) use instead of the logs.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from collectors import edge, schema
from collectors.collected import Collected, Source, empty

if TYPE_CHECKING:
    from pathlib import Path

    from collectors.agent.flight import Log
    from collectors.collected import Reading


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory."""
    return (path / "run.json").is_file() or (path / "ranks").is_dir()


def _logs(run: Path, sources: list[Source]) -> tuple[list[Log], list[Log]]:
    """(logs of the last attempt, logs of earlier ones)."""
    from collectors.agent import flight

    found: dict[tuple[int, int], Log] = {}
    for directory in sorted((run / "ranks").glob("*")):
        name = f"ranks/{directory.name}"
        try:
            log = flight.read(directory)
        except FileNotFoundError:
            sources.append(Source(name, "flight-log", "none", ("it has no meta.json",)))
            continue
        except (OSError, ValueError) as why:
            sources.append(Source(name, "flight-log", "none", (str(why),)))
            continue
        problems = list(log.problems)
        key = int(log.meta.get("attempt", 0)), int(log.meta["rank"])
        if key in found:
            problems.append(f"it says that it is rank {key[1]}, as another log does; not read")
            sources.append(Source(name, "flight-log", "none", edge.few(problems)))
            continue
        if log.dropped:
            problems.append(f"{log.dropped} oldest records were overwritten (bounded log)")
        read = "part" if problems else "all"
        sources.append(Source(name, "flight-log", read, edge.few(problems)))
        found[key] = log
    last = max((attempt for attempt, _ in found), default=0)
    now = [found[key] for key in sorted(found) if key[0] == last]
    return now, [found[key] for key in sorted(found) if key[0] != last]


def _exception(log: Log, row: dict[str, Any], sources: list[Source]) -> None:
    problems: list[str] = []
    body = edge.content(log.directory / "exception.json", problems)
    if isinstance(body, dict):
        message = str(body.get("message", "")).strip()
        row["exception"] = str(body.get("type", "")) + (f": {message}" if message else "")
        row["traceback"] = str(body.get("traceback", ""))
        row["exception_ns"] = edge.time_ns(body.get("time_ns"))
    if problems:
        name = f"ranks/{log.directory.name}/exception.json"
        sources.append(Source(name, "exception", "none", tuple(problems)))


def _ranks(run: Path, logs: list[Log], sources: list[Source]) -> Any:
    """The ranks table: logs, exceptions, and exits as the supervisor saw them."""
    from collectors import ledger

    rows: dict[tuple[int, int], dict[str, Any]] = {}
    problems: list[str] = []
    for log in logs:
        row = ledger.rank_row(log)
        _exception(log, row, sources)
        rows[int(row["rank"]), int(row["attempt"])] = row
    exits = run / "exits.jsonl"
    for line, told in edge.lines(exits, problems):
        known = {"attempt": 0} | {k: v for k, v in told.items() if v is not None}
        end = edge.row(schema.TABLES["ranks"], known, f"exits.jsonl line {line}", problems)
        if end["rank"] is None or end["attempt"] not in range(1001):
            problems.append(f"exits.jsonl line {line} names no rank; left out")
            continue
        key = (end["rank"], end["attempt"])
        row = rows.setdefault(key, {"rank": key[0], "attempt": key[1]})
        row.update(
            {k: end[k] for k in ("exit_code", "signal", "ended_ns")},
            pid=row.get("pid") or end["pid"],
            host=row.get("host") or end["host"],
        )
    if exits.exists() or problems:
        read = "part" if problems else "all"
        sources.append(Source("exits.jsonl", "rank-exits", read, edge.few(problems)))
    return schema.table("ranks", [rows[key] for key in sorted(rows)])


def _cpu_shares(path: Path, problems: list[str]) -> dict[int, float]:
    """Rank -> share of a core that its process used between the looks of one capture."""
    body = edge.content(path, problems)
    found = {
        entry["rank"]: edge.number(entry.get("cpu_share"))
        for entry in edge.mappings(body.get("ranks") if isinstance(body, dict) else None)
        if edge.rank(entry.get("rank")) is not None
    }
    return {rank: share for rank, share in found.items() if share is not None}


def _look(path: Path, name: str, problems: list[str]) -> list[dict[str, Any]]:
    """Rows of one file of stacks; entries of other types are problems."""
    body = edge.content(path, problems)
    look = path.stem.rpartition("-")[2]
    if not isinstance(body, dict) or not isinstance(body.get("ranks"), list):
        if not problems:
            problems.append("it holds no list of ranks")
        return []
    rows: list[dict[str, Any]] = []
    entries = edge.mappings(body["ranks"])
    for entry in entries:
        if entry.get("problem"):
            problems.append(f"rank {entry.get('rank')}: {entry['problem']}")
        threads = edge.mappings(entry.get("threads"))
        if entry.get("threads") and entry["threads"] != threads:
            problems.append(f"rank {entry.get('rank')}: threads are not readable; left out")
        for thread in threads:
            where = f"rank {entry.get('rank')}, thread {thread.get('name')}"
            told = {**entry, **thread, "thread": thread.get("name"), "locator": where}
            told |= {"rank": entry.get("rank"), "pid": entry.get("pid"), "source": name}
            told |= {"look": int(look) if look.isdecimal() and len(look) < 7 else None}
            told |= {"time_ns": body.get("time_ns"), "main": bool(thread.get("main"))}
            rows.append(edge.row(schema.TABLES["stacks"], told, where, problems))
            rows[-1]["frames"] = rows[-1]["frames"] or []
    if len(entries) < len(body["ranks"]):
        problems.append("entries of ranks are not readable; left out")
    return [row for row in rows if row["rank"] is not None and row["look"] is not None]


def _stacks(run: Path, sources: list[Source]) -> Any:
    rows: list[dict[str, Any]] = []
    for path in sorted(run.glob("captures/*/stacks-*.json")):
        name = str(path.relative_to(run))
        problems: list[str] = []
        shares = _cpu_shares(path.parent / "proc.json", problems)
        looked = _look(path, name, problems)
        rows += [{**row, "cpu_share": shares.get(row["rank"])} for row in looked]
        sources.append(Source(name, "stacks", "part" if problems else "all", edge.few(problems)))
    return schema.table("stacks", rows)


def _samples(run: Path, name: str, file: str, sources: list[Source]) -> Any:
    rows: list[dict[str, Any]] = []
    for path in sorted(run.glob(f"nodes/*/{file}")):
        problems: list[str] = []
        rows += [
            edge.row(schema.TABLES[name], told, f"line {line}", problems)
            for line, told in edge.lines(path, problems)
        ]
        read = "part" if problems else "all"
        where = str(path.relative_to(run))
        sources.append(Source(where, f"{name}-samples", read, edge.few(problems)))
    return schema.table(name, rows)


def _printed(run: Path) -> list[Reading]:
    """What the job printed and what the kernel said, as log events."""
    from collectors import readers
    from collectors.readers import artifact

    paths = [run / "job.stderr", run / "job.stdout", *sorted(run.glob("nodes/*/*.log"))]
    readings = [
        readers.read_artifact(artifact.from_file(path, str(path.relative_to(run))))
        for path in paths
        if path.is_file() and path.stat().st_size
    ]
    readers.settle_all(readings)
    return readings


def read_run(run: Path) -> Collected:
    """All tables of a run directory. Raises FileNotFoundError when it is none."""
    from collectors import ledger

    if not is_run(run):
        raise FileNotFoundError(f"{run} is not a run directory: it has neither run.json nor ranks/")
    out = empty()
    problems: list[str] = []
    facts = edge.content(run / "run.json", problems)
    if isinstance(facts, dict) and facts:
        out.run = edge.run_facts(facts, problems)
        read = "part" if problems else "all"
    else:
        problems = problems or ["run.json is missing or holds no facts"]
        read = "none"
    out.sources.append(Source("run.json", "run", read, edge.few(problems)))
    logs, earlier = _logs(run, out.sources)
    kept = _kept_tables(run) if out.run.get("state") == "finished" else None
    if kept is not None:
        out.tables.update(kept[0])
        out.sources = [out.sources[0], *(s for s in kept[1] if s.path != "run.json")]
    else:
        out.tables.update(ledger.tables(logs))
        out.tables["ranks"] = _ranks(run, logs + earlier, out.sources)
        out.tables["stacks"] = _stacks(run, out.sources)
        out.tables["hosts"] = _samples(run, "hosts", "host.jsonl", out.sources)
        out.tables["devices"] = _samples(run, "devices", "devices.jsonl", out.sources)
        events: list[dict[str, Any]] = []
        for reading in _printed(run):
            out.sources.append(reading.source)
            events += reading.rows.get("log_events", [])
        out.tables["log_events"] = schema.table("log_events", events)
    sizes = [log.meta.get("world_size") for log in logs]
    sizes += [len(g.ranks) for log in logs for g in log.groups.values()]
    sizes.append(out.run.get("world_size"))
    out.world_size = max((s for s in sizes if isinstance(s, int)), default=None)
    return out


def _kept_tables(run: Path) -> tuple[dict[str, Any], list[Source]] | None:
    """The compacted tables and what they stand on, when all are there and of this schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = {}
    try:
        if (run / "tables" / "schema_version").read_text().strip() != str(schema.SCHEMA_VERSION):
            return None
        for name in schema.TABLES:
            table = pq.read_table(run / "tables" / f"{name}.parquet")
            if not table.schema.equals(schema.arrow_schema(name)):
                return None
            table.validate(full=True)
            out[name] = table
        sources = [
            Source(str(s["path"]), str(s["kind"]), str(s["read"]), tuple(map(str, s["problems"])))
            for s in edge.load(run / "tables" / "sources.json")
        ]
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None
    return out, sources


def compact(run: Path) -> None:
    """Write tables/*.parquet, all or none. Raises OSError when the disk does not let it."""
    import pyarrow.parquet as pq

    shutil.rmtree(run / "tables", ignore_errors=True)
    collected = read_run(run)
    partial = run / "tables.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, table in collected.tables.items():
        pq.write_table(table, partial / f"{name}.parquet", compression="zstd")
    (partial / "sources.json").write_text(json.dumps([asdict(s) for s in collected.sources]))
    (partial / "schema_version").write_text(f"{schema.SCHEMA_VERSION}\n")
    partial.rename(run / "tables")
