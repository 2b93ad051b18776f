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

from collectors import schema
from collectors.collected import Collected, Source, empty

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from collectors.agent.flight import Log
    from collectors.collected import Reading

_MOST_BYTES = 64 << 20
"""Largest JSON file of a run directory that is read."""


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory."""
    return (path / "run.json").is_file() or (path / "ranks").is_dir()


def _json(path: Path, problems: list[str]) -> Any:
    """The content of a JSON file; None, and a problem, when there is none to be had."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            problems.append(f"{path.name} is larger than {_MOST_BYTES >> 20} MiB; not read")
            return None
        return json.loads(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as why:
        problems.append(f"{path.name} is not readable: {why}")
        return None


def _lines(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a JSON-lines file with their line numbers; a cut last line is a problem."""
    if not path.is_file():
        return
    with path.open(errors="replace") as handle:
        for number, text in enumerate(handle, 1):
            try:
                value = json.loads(text)
            except ValueError:
                problems.append(f"{path.name} line {number} is not readable")
                continue
            if isinstance(value, dict):
                yield number, value


def _logs(run: Path, sources: list[Source]) -> tuple[list[Log], list[Log]]:
    """(logs of the last attempt, logs of earlier ones)."""
    from collectors.agent import flight

    found = []
    for directory in sorted((run / "ranks").glob("*")):
        name = f"ranks/{directory.name}"
        try:
            log = flight.read(directory)
        except FileNotFoundError:
            sources.append(Source(name, "flight-log", "none", ("it has no meta.json",)))
            continue
        except (OSError, ValueError, TypeError) as why:
            sources.append(Source(name, "flight-log", "none", (str(why),)))
            continue
        problems = list(log.problems)
        if log.dropped:
            problems.append(f"{log.dropped} oldest records were overwritten (bounded log)")
        read = "part" if problems else "all"
        sources.append(Source(name, "flight-log", read, tuple(problems)))
        found.append(log)
    last = max((int(log.meta.get("attempt", 0)) for log in found), default=0)
    now = [log for log in found if int(log.meta.get("attempt", 0)) == last]
    return sorted(now, key=lambda log: int(log.meta["rank"])), [x for x in found if x not in now]


def _exception(log: Log, row: dict[str, Any], problems: list[str]) -> None:
    body = _json(log.directory / "exception.json", problems)
    if isinstance(body, dict):
        message = str(body.get("message", "")).strip()
        row["exception"] = str(body.get("type", "")) + (f": {message}" if message else "")
        row["traceback"] = str(body.get("traceback", ""))
        at = body.get("time_ns")
        row["exception_ns"] = at if isinstance(at, int) else None


def _ranks(run: Path, logs: list[Log], sources: list[Source]) -> Any:
    """The ranks table: logs, exceptions, and exits as the supervisor saw them."""
    from collectors import ledger

    rows: dict[tuple[int, int], dict[str, Any]] = {}
    problems: list[str] = []
    for log in logs:
        row = ledger.rank_row(log)
        _exception(log, row, problems)
        rows[int(row["rank"]), int(row["attempt"])] = row
    exits = run / "exits.jsonl"
    for _number, end in _lines(exits, problems):
        key = (end.get("rank"), end.get("attempt", 0))
        if not all(isinstance(part, int) for part in key):
            continue
        row = rows.setdefault(key, {"rank": key[0], "attempt": key[1]})  # type: ignore[arg-type]
        row.update(
            {k: end.get(k) for k in ("exit_code", "signal", "ended_ns")},
            pid=row.get("pid") or end.get("pid"),
            host=row.get("host") or end.get("host"),
        )
    if exits.exists() or problems:
        read = "part" if problems else "all"
        sources.append(Source("exits.jsonl", "rank-exits", read, tuple(problems)))
    return schema.table("ranks", [rows[key] for key in sorted(rows)])


def _cpu_shares(path: Path, problems: list[str]) -> dict[Any, float]:
    """Rank -> share of a core that its process used between the looks of one capture."""
    body = _json(path, problems)
    entries = body.get("ranks") if isinstance(body, dict) else None
    return {
        entry["rank"]: float(entry["cpu_share"])
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("rank"), int)
        and isinstance(entry.get("cpu_share"), int | float)
    }


def _stacks(run: Path, sources: list[Source]) -> Any:
    rows: list[dict[str, Any]] = []
    for path in sorted(run.glob("captures/*/stacks-*.json")):
        name = str(path.relative_to(run))
        problems: list[str] = []
        body = _json(path, problems)
        shares = _cpu_shares(path.parent / "proc.json", problems)
        for entry in body.get("ranks", []) if isinstance(body, dict) else []:
            if entry.get("problem"):
                problems.append(f"rank {entry.get('rank')}: {entry['problem']}")
            rows.extend(
                {
                    "look": int(path.stem.rpartition("-")[2]),
                    "time_ns": body.get("time_ns"),
                    "rank": entry.get("rank"),
                    "pid": entry.get("pid"),
                    "thread": thread.get("name"),
                    "main": bool(thread.get("main")),
                    "frames": [str(frame) for frame in thread.get("frames", [])],
                    "state": thread.get("state"),
                    "cpu_share": shares.get(entry.get("rank")),
                    "source": name,
                    "locator": f"rank {entry.get('rank')}, thread {thread.get('name')}",
                }
                for thread in entry.get("threads", [])
            )
        sources.append(Source(name, "stacks", "part" if problems else "all", tuple(problems)))
    return schema.table("stacks", rows)


def _samples(run: Path, name: str, file: str, sources: list[Source]) -> Any:
    known = {column.name for column in schema.TABLES[name]}
    rows: list[dict[str, Any]] = []
    for path in sorted(run.glob(f"nodes/*/{file}")):
        problems: list[str] = []
        rows += [{k: v for k, v in row.items() if k in known} for _, row in _lines(path, problems)]
        read = "part" if problems else "all"
        sources.append(Source(str(path.relative_to(run)), f"{name}-samples", read, tuple(problems)))
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
    facts = _json(run / "run.json", problems)
    out.run = facts if isinstance(facts, dict) else {}
    read = "none" if not out.run else "all"
    if not out.run and not problems:
        problems.append("run.json is missing")
    out.sources.append(Source("run.json", "run", read, tuple(problems)))
    logs, earlier = _logs(run, out.sources)
    kept = _kept_tables(run) if out.run.get("state") == "finished" else None
    if kept is not None:
        out.tables.update(kept[0])
        out.sources = kept[1]
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
            if table.schema.names != schema.arrow_schema(name).names:
                return None
            out[name] = table
        listed = json.loads((run / "tables" / "sources.json").read_text())
        sources = [Source(s["path"], s["kind"], s["read"], tuple(s["problems"])) for s in listed]
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
