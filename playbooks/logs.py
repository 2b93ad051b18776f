"""What recognised log lines say about ends of processes and raised exceptions.

In: table log_events (kinds and fields as the log readers write them). Out: the same End and Raised
that run directories yield, so that a rule does not care where its evidence came from.
A line without a rank stays without one: nothing is guessed from the order of lines.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from playbooks import knowledge
from playbooks.facts import End, Raised
from playbooks.finding import Item

if TYPE_CHECKING:
    from collectors.collected import Collected


def events(collected: Collected, *kinds: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row, fields) of every event of these kinds; fields that are no JSON object are empty."""
    out = []
    for row in collected.rows("log_events"):
        if row["kind"] in kinds:
            try:
                fields = json.loads(row["fields"] or "{}")
            except ValueError:
                fields = {}
            out.append((row, fields if isinstance(fields, dict) else {}))
    return out


MEMORY_KILLS = ("kernel.oom-kill", "kernel.oom-killed", "slurm.oom")
"""Lines that say that memory ran out on the host; `pid` names the process where they have it."""
_EXITS = ("elastic.worker-exit", "elastic.failure", "slurm.task-exit", "mpi.exit", "deepspeed.exit")
_FAULTS = {
    "Illegal instruction": 4,
    "Bus error": 7,
    "Floating": 8,
    "Segmentation fault": 11,
    "Segfault": 11,
}
"""What a process prints of its own fault -> signal; SIGABRT has a reason elsewhere."""
_FRAME = re.compile(r"^(.*) \((.*):(\d+)\)$")


def item(row: dict[str, Any]) -> Item:
    """A log line as evidence."""
    return Item(row["source"] or "log", row["locator"] or "", (row["quote"] or "").strip()[:300])


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def ends(collected: Collected) -> list[End]:
    """Exits that a launcher or scheduler printed: the earliest line of each rank."""
    out: dict[int, End] = {}
    for row, fields in events(collected, *_EXITS, "process.fault"):
        rank = row["rank"] if row["rank"] is not None else _whole(fields.get("rank"))
        if rank is None:
            continue
        known = out.get(rank)
        if known is not None and (row["time_ns"] is None or (known.at_ns or 0) <= row["time_ns"]):
            continue
        signal = _whole(fields.get("signal"))
        if row["kind"] == "process.fault":
            said = str(fields.get("message") or "")
            signal = signal or next((n for w, n in _FAULTS.items() if w in said), None)
            if signal not in _FAULTS.values():
                continue
        code = _whole(fields.get("exit_code"))
        if signal is None and code is not None and 128 < code < 160:
            signal, code = code - 128, None
        out[rank] = End(rank, signal, code, row["time_ns"], None, row["host"], item(row))
    return list(out.values())


def _traceback(frames: object) -> str:
    """Frames "function (file:line)", innermost first, as Python prints a traceback."""
    lines = []
    for frame in reversed(frames if isinstance(frames, list) else []):
        found = _FRAME.match(frame) if isinstance(frame, str) else None
        if found:
            lines.append(f'  File "{found[2]}", line {found[3]}, in {found[1]}')
    return "\n".join(lines)


def raised(collected: Collected) -> list[Raised]:
    """Uncaught exceptions of ranks: tracebacks in logs, and error files of the launcher."""
    out = []
    for row, fields in events(collected, "python.exception"):
        if fields.get("uncaught") is False or fields.get("launcher") or fields.get("chained"):
            continue
        parts = [str(fields[k]) for k in ("type", "message") if isinstance(fields.get(k), str)]
        source = fields.get("source")
        if parts[1:] == [""] and isinstance(source, str) and source.startswith("assert"):
            parts[1] = source  # a bare assertion says what it refuses in its own code
        text = " ".join((": ".join(p for p in parts if p) or row["quote"] or "").split())
        if text:
            out.append(
                Raised(
                    row["rank"],
                    knowledge.classify(text),
                    text,
                    _traceback(fields.get("frames")),
                    row["time_ns"],
                    row["host"],
                    item(row),
                )
            )
    return out
