"""What single fields of a Flight Recorder dump mean; pure functions, no file.

In: plain values of a decoded dump, of any version, right or wrong. Out: typed values, None where
the dump does not say. Torch writes the same field as a number, a string or a list, by version and
encoding.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from collectors.c10d import dtype_size, dtype_word, ranks_text

if TYPE_CHECKING:
    from collectors.readers.fr_decode import Dump

NONE_YET = {2**64 - 1, 2**32 - 1, -1}
"""How "no collective yet" is written, by signedness."""
_DIGITS = re.compile(r"(\d+)$")
_RANK = re.compile(r"rank[_-]?(\d+)(?!\d)", re.IGNORECASE)
_SUFFIX = re.compile(r"\.(?:json|pkl|pickle|p|bin|gz|dump|trace|txt|pt)$", re.IGNORECASE)
_P2P = re.compile(r"\b(?:send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")


@dataclass(frozen=True)
class Group:
    """A process group as one dump describes it."""

    name: str
    description: str
    ranks: tuple[int, ...] | None


def rank_of_name(path: str) -> int | None:
    """The rank that a dump's name states: `rank_3...`, or its trailing digits."""
    parts = PurePath(path).parts
    if not parts:
        return None
    name = parts[-1]
    while (bare := _SUFFIX.sub("", name)) != name:
        name = bare
    for found in (
        list(_RANK.finditer(name))[-1:],
        list(_DIGITS.finditer(name)),
        list(_RANK.finditer(parts[-2])) if len(parts) > 1 else [],
    ):
        if found and len(found[0].group(1)) < 8:
            return int(found[0].group(1))
    return None


def _ranks(value: object) -> tuple[int, ...] | None:
    """Ranks of a pg_config entry: a list, or the text of one; None when it does not say."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r < 2**31 for r in value):
        return None
    return tuple(value)


def groups_of(dump: Dump) -> dict[str, Group]:
    """c10d name -> group, from pg_config and from the entries themselves."""
    out: dict[str, Group] = {}
    config = dump.top.get("pg_config")
    for key, raw in config.items() if isinstance(config, dict) else ():
        if not isinstance(raw, dict):
            continue
        name = str(raw.get("name", key))
        ranks = _ranks(raw.get("ranks"))
        description = str(raw.get("desc", ""))
        if name:  # gloo writes one nameless group, whatever groups there are
            out[name] = Group(name, description, ranks)
    for entry in dump.entries:
        name, description = group_name(entry)
        if name not in out:
            out[name] = Group(name, description, None)
    return out


def group_name(entry: dict[str, Any]) -> tuple[str, str]:
    pair = entry.get("process_group")
    if isinstance(pair, list | tuple) and len(pair) == 2:
        return str(pair[0]), str(pair[1])
    return str(entry.get("pg_id", "0")), ""


def number(value: object) -> int | None:
    """An integer, also from JSON's strings."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else None
    if isinstance(value, str) and len(value) < 24:
        try:
            return int(value)
        except ValueError:
            return None
    return None


def when(value: object) -> int | None:
    """A time; 0 and None both mean that it never happened."""
    found = number(value)
    return found if found is not None and 0 < found < 2**63 else None


def state_of(entry: dict[str, Any], backend: str) -> str:
    """issued, started, completed or failed.

    gloo leaves every entry "scheduled" and marks it retired when it is done. Everywhere else an
    entry that was retired without having completed was taken out by a timeout or an abort.
    """
    said = str(entry.get("state", "scheduled"))
    retired = entry.get("retired") is True
    if said == "completed" or (backend == "gloo" and retired):
        return "completed"
    if retired:
        return "failed"
    return "started" if said == "started" else "issued"


def size_of(sizes: object, dtypes: list[str]) -> int | None:
    """Bytes of the tensors with these sizes; None when a dtype is not known."""
    if not isinstance(sizes, list) or not sizes or not dtypes:
        return None
    total = 0
    for i, shape in enumerate(sizes):
        one = dtype_size(dtypes[min(i, len(dtypes) - 1)])
        if one is None or not isinstance(shape, list | tuple):
            return None
        for dim in shape:
            if not isinstance(dim, int) or not 0 <= dim < 2**48 or one >= 2**62:
                return None
            one *= dim
        total += one
    return total if total < 2**63 else None


def shape_of(sizes: object) -> str | None:
    """`[2048, 1, 5120]`, with ` x3` behind it when there are three tensors."""
    if not isinstance(sizes, list) or not sizes or not isinstance(sizes[0], list | tuple):
        return None
    dims = [str(d) for d in sizes[0][:16] if isinstance(d, int)]
    return f"[{', '.join(dims)}]" + (f" x{len(sizes)}" if len(sizes) > 1 else "")


def peer_of(name: str, own: int | None, group: Group) -> int | None:
    """Global rank of a send's or receive's other side; None where two readings differ."""
    found = _P2P.search(name)
    if not found or own is None or group.ranks is None:
        return None
    mine, other = int(found.group(1)), int(found.group(2))
    ranks = group.ranks
    meant = set()
    if mine == own and other in ranks:
        meant.add(other)
    if mine < len(ranks) and ranks[mine] == own and other < len(ranks):
        meant.add(ranks[other])
    return meant.pop() if len(meant) == 1 else None


def dtypes_of(entry: dict[str, Any], key: str) -> list[str]:
    value = entry.get(key)
    listed = value if isinstance(value, list | tuple) else []
    return [dtype_word(d) for d in listed if isinstance(d, str)]


def key(group: Group) -> str:
    return f"{group.name}[{'?' if group.ranks is None else ranks_text(group.ranks)}]"
