"""Foreign values at the edge of a run directory: each fits the tables, or is refused.

In: files that a damaged disk, a cut copy or another program may have changed. Out: plain values
within bounds (ranks below `MOST_RANKS`, times below `MOST_NS`, finite numbers, text that can be
encoded), None for the rest, and a sentence in `problems` for what was refused. Never raises but
where it says so, and never holds more of one file than `MOST_BYTES`.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from collectors.schema import Column

MOST_BYTES = 64 << 20
"""Largest JSON file, and most of a JSON-lines file, that is read."""
MOST_RANKS = 1 << 20
"""More ranks than any job has; beyond it a number is damage."""
MOST_NS = 1 << 62
"""Nanoseconds since the epoch that stay within int64 when two are added: the year 2116."""
_MOST_LINE = 16 << 20
_MOST_DEPTH = 64
_MOST_PROBLEMS = 20


def whole(value: Any, low: int = -(1 << 63), high: int = (1 << 63) - 1) -> int | None:
    """An integer within `low`..`high`, else None; a bool is none, 3.0 is 3."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and low <= value <= high else None


def time_ns(value: Any) -> int | None:
    """A time, else None."""
    return whole(value, 0, MOST_NS)


def rank(value: Any) -> int | None:
    """A global rank, else None."""
    return whole(value, 0, MOST_RANKS - 1)


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def text(value: Any) -> str | None:
    """Text, else None."""
    return value if isinstance(value, str) else None


def mappings(value: Any) -> list[dict[str, Any]]:
    """The mappings of a list; what is none is left out."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def few(problems: list[str]) -> tuple[str, ...]:
    """The first problems, and how many more there are."""
    if len(problems) <= _MOST_PROBLEMS:
        return tuple(problems)
    more = len(problems) - _MOST_PROBLEMS
    return (*problems[:_MOST_PROBLEMS], f"and {more} more problems like these")


def _clean(value: Any, depth: int = 0) -> Any:
    """`value` with text that UTF-8 can hold (JSON allows half a surrogate pair)."""
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_clean(one, depth + 1) for one in value]
    if isinstance(value, dict):
        return {_clean(k, depth + 1): _clean(v, depth + 1) for k, v in value.items()}
    return value


def loads(raw: str | bytes) -> Any:
    """JSON as plain values. Raises ValueError, for too deep nesting as well."""
    try:
        found = json.loads(raw if isinstance(raw, str) else raw.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return _clean(found)


def load(path: Path) -> Any:
    """Content of a JSON file. Raises OSError, and ValueError when it is not readable."""
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError("it is no regular file")
    if size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    with path.open("rb") as handle:
        return loads(handle.read(MOST_BYTES + 1))


def content(path: Path, problems: list[str]) -> Any:
    """`load`; None when the file is missing, and None and a problem when it is not readable."""
    try:
        return load(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as why:
        problems.append(f"{path.name} is not readable: {why}")
        return None


def lines(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a JSON-lines file with their line numbers; other lines are problems."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as handle:
            left, line = MOST_BYTES, 0
            while raw := handle.readline(_MOST_LINE):
                line += 1
                left -= len(raw)
                if left < 0 or len(raw) == _MOST_LINE:
                    problems.append(f"{path.name} is too large from line {line} on; not read")
                    return
                try:
                    value = loads(raw)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield line, value
                else:
                    problems.append(f"{path.name} line {line} is not readable")
    except OSError as why:
        problems.append(f"{path.name} is not readable: {why.strerror}")


def _cell(column: Column, value: Any) -> Any:
    if column.dtype == "int64":
        if column.unit == "ns":
            return time_ns(value)
        return rank(value) if column.name == "rank" else whole(value)
    if column.dtype == "float64":
        return number(value)
    if column.dtype == "bool":
        return value if isinstance(value, bool) else None
    if column.dtype == "string":
        return text(value)
    inner = text if column.dtype == "list<string>" else whole
    return [v for v in map(inner, value) if v is not None] if isinstance(value, list) else None


def row(
    columns: tuple[Column, ...], values: Mapping[str, Any], where: str, problems: list[str]
) -> dict[str, Any]:
    """`values` as a row of a table: wrong types become null and a problem, other keys go."""
    out: dict[str, Any] = {}
    for column in columns:
        value = values.get(column.name)
        out[column.name] = None if value is None else _cell(column, value)
        if value is not None and out[column.name] is None:
            problems.append(f"{where}: {column.name} is no {column.dtype} that can be; left out")
    return out


def _hang(entry: dict[str, Any]) -> dict[str, Any] | None:
    out = dict(entry)
    for key in ("since_ns", "detected_ns", "verdict_ns"):
        out[key] = time_ns(entry.get(key))
        if entry.get(key) is not None and out[key] is None:
            return None
    out["hang_after_s"] = number(entry.get("hang_after_s"))
    out["capture"] = text(entry.get("capture"))
    return out


def _run_value(key: str, value: Any) -> Any:
    if key == "world_size":
        return whole(value, 1, MOST_RANKS)
    if key in ("started_ns", "ended_ns"):
        return time_ns(value)
    if key in ("exit_code", "signal"):
        return whole(value, -255, 255)
    if key in ("pid", "attempts"):
        return whole(value, 0, (1 << 31) - 1)
    if key == "interrupted":
        return value if isinstance(value, bool) else None
    if key in ("schema", "state", "name", "cwd", "host"):
        return text(value)
    if key == "command":
        return [str(word) for word in value] if isinstance(value, list) else None
    if key in ("versions", "env", "agent"):
        return value if isinstance(value, dict) else None
    return value


def run_facts(facts: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """What run.json says, each known value of its type and within bounds, else null."""
    out: dict[str, Any] = {}
    for key, value in facts.items():
        if key == "hangs":
            found = [_hang(entry) for entry in mappings(value)]
            out[key] = [entry for entry in found if entry is not None]
            if value is not None and (not isinstance(value, list) or len(out[key]) < len(value)):
                problems.append("run.json: entries of hangs are not readable; left out")
            continue
        out[key] = _run_value(key, value)
        if value is not None and out[key] is None:
            problems.append(f"run.json: {key} has no value that can be; left out")
    for outer, inner, kind in (("env", "set", dict), ("agent", "problems", list)):
        part = out.get(outer)
        if isinstance(part, dict) and not isinstance(part.get(inner, kind()), kind):
            out[outer] = {key: value for key, value in part.items() if key != inner}
            problems.append(f"run.json: {outer}.{inner} has no value that can be; left out")
    return out


def meta_facts(facts: Any, problems: list[str]) -> dict[str, Any]:
    """What a rank's meta.json says. Raises ValueError when it does not name a rank."""
    if not isinstance(facts, dict) or rank(facts.get("rank")) is None:
        raise ValueError("it does not name a rank")
    out = dict(facts)
    bounds = {
        "rank": (0, MOST_RANKS - 1),
        "local_rank": (0, MOST_RANKS - 1),
        "world_size": (1, MOST_RANKS),
        "attempt": (0, 1000),
        "pid": (0, (1 << 31) - 1),
    }
    for key in (*bounds, "host"):
        if out.get(key) is None:
            out.pop(key, None)
            continue
        found = text(out[key]) if key == "host" else whole(out[key], *bounds[key])
        if found is None:
            del out[key]
            problems.append(f"meta.json: {key} has no value that can be; left out")
        else:
            out[key] = found
    return out
