"""Flight Recorder dumps of torch 2.2 to 2.15 (NCCL, gloo and vendors; pickle and JSON).

In: one dump, which is one rank's. Out: rows of ranks, groups, collectives and stacks, and of
log_events the kinds

    fr.dump       {version, backend, entries, first_record, wrapped, encoding}
    fr.pg_status  {pg_id, group_id, last_enqueued, last_started, last_completed}; -1 is "none yet"

The rank stands only in the file's name. What `scheduled` and `retired` prove differs by backend:
see `state_of`. Group keys are provisional here; fr_settle makes them equal on all members.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collectors.c10d import axis_word, op_word
from collectors.collected import Reading, Source
from collectors.readers.artifact import TooLargeError
from collectors.readers.fr_decode import NotADumpError, decode
from collectors.readers.fr_fields import (
    NONE_YET,
    Group,
    dtypes_of,
    group_name,
    groups_of,
    key,
    number,
    peer_of,
    rank_of_name,
    shape_of,
    size_of,
    state_of,
    when,
)

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact
    from collectors.readers.fr_decode import Dump

KIND = "flight-recorder"
BYTES = 256 * 2**20
"""A larger dump is refused."""
_WORDS = (b"pg_config", b"profiling_name", b"entries", b"pg_status")


@dataclass
class FlightReading(Reading):
    """A Reading, and what settling groups and ranks across files needs."""

    rank: int | None = None
    version: str = ""
    names: dict[str, Group] = field(default_factory=dict)
    """Provisional group key -> what this dump knows of it."""
    signature: tuple[Any, ...] = ()
    """Equal for two files of one dump (pickle and JSON)."""
    last_ns: int = 0
    encoding: str = "pickle"


def sniff(head: bytes) -> bool:
    """A pickle of protocol 2 and up, or text that holds the words of a dump."""
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return True
    start = head.lstrip(b" \t\r\n\xef\xbb\xbf")[:1]
    if start in (b"{", b"["):
        return b"profiling_name" in head or (
            b"pg_config" in head and (b"pg_status" in head or b"nccl_comm_state" in head)
        )
    return head[:1] in b"(]}" and any(word in head for word in _WORDS)


class _Rows:
    """Turns entries into rows of one reading."""

    def __init__(self, reading: FlightReading, groups: dict[str, Group], keys: dict[str, str]):
        self.reading = reading
        self.groups = groups
        self.keys = keys
        self.stacks: dict[tuple[str, ...], int] = {}

    def stack(self, frames: object) -> int | None:
        if not isinstance(frames, list) or not frames:
            return None
        lines = tuple(
            f"{f.get('name')} ({f.get('filename')}:{f.get('line')})"
            for f in frames[:64]
            if isinstance(f, dict) and isinstance(f.get("name"), str)
        )
        if lines not in self.stacks:
            self.stacks[lines] = len(self.stacks)
            self.reading.add(
                "stacks",
                rank=self.reading.rank,
                frames=list(lines),
                state="issuing",
                source=self.reading.source.path,
            )
        return self.stacks[lines]

    def collective(self, position: int, entry: dict[str, Any]) -> None:
        name = str(entry.get("profiling_name", ""))
        backend = name.partition(":")[0] if ":" in name else ""
        group = self.groups[group_name(entry)[0]]
        op = op_word(name)
        p2p = entry.get("is_p2p") is True or op in ("send", "recv")
        seq = entry.get("p2p_seq_id") if p2p else entry.get("collective_seq_id")
        created = number(entry.get("time_created_ns"))
        started = when(entry.get("time_discovered_started_ns"))
        ended = when(entry.get("time_discovered_completed_ns"))
        dtypes = dtypes_of(entry, "input_dtypes")
        outputs = dtypes_of(entry, "output_dtypes") or dtypes
        record = number(entry.get("record_id"))
        self.reading.add(
            "collectives",
            rank=self.reading.rank,
            group_id=self.keys[group.name],
            seq=number(entry.get("seq_id") if seq is None else seq),
            op=op,
            dtype=dtypes[0] if dtypes else None,
            shape=shape_of(entry.get("input_sizes")),
            bytes_in=size_of(entry.get("input_sizes"), dtypes),
            bytes_out=size_of(entry.get("output_sizes"), outputs),
            peer=peer_of(name, self.reading.rank, group) if p2p else None,
            issue_ns=created,
            start_ns=started,
            end_ns=ended,
            state=state_of(entry, backend),
            p2p=p2p,
            stack_id=self.stack(entry.get("frames")),
            source=self.reading.source.path,
            locator=f"entry {position}" + ("" if record is None else f" (record {record})"),
        )
        self.reading.last_ns = max(self.reading.last_ns, created or 0, ended or 0)


def _backends(dump: Dump) -> dict[str, str]:
    """Group name -> backend, from the entries' names."""
    out: dict[str, str] = {}
    for entry in dump.entries:
        backend, colon, _ = str(entry.get("profiling_name", "")).partition(":")
        if colon:
            out.setdefault(group_name(entry)[0], backend)
    return out


def _statuses(reading: FlightReading, dump: Dump, keys: dict[str, str]) -> None:
    by_id = {str(e.get("pg_id")): group_name(e)[0] for e in dump.entries}
    status = dump.top.get("pg_status")
    for pg, raw in status.items() if isinstance(status, dict) else ():
        if not isinstance(raw, dict):
            continue
        numbers: dict[str, Any] = {}
        for word in ("enqueued", "started", "completed"):
            value = number(raw.get(f"last_{word}_collective"))
            numbers[f"last_{word}"] = -1 if value in NONE_YET else value
        group = keys.get(by_id.get(str(pg), ""))
        reading.add(
            "log_events",
            rank=reading.rank,
            source=reading.source.path,
            locator=f"pg_status[{str(pg)[:40]}]",
            kind="fr.pg_status",
            fields=json.dumps({"pg_id": str(pg)[:40], "group_id": group, **numbers}),
            quote=", ".join(f"{word} {value}" for word, value in numbers.items()),
        )


def _summary(reading: FlightReading, dump: Dump) -> None:
    created = [c for e in dump.entries if (c := when(e.get("time_created_ns"))) is not None]
    if reading.rank is not None:
        reading.add(
            "ranks",
            rank=reading.rank,
            first_seen_ns=min(created, default=None),
            last_seen_ns=max(created, default=None),
        )
    first = number(dump.entries[0].get("record_id")) if dump.entries else None
    backend = next(iter(_backends(dump).values()), None)
    fields = {
        "version": reading.version,
        "backend": backend,
        "entries": len(dump.entries),
        "first_record": first,
        "wrapped": None if first is None else first > 0,
        "encoding": dump.encoding,
    }
    reading.add(
        "log_events",
        rank=reading.rank,
        time_ns=max(created, default=None),
        source=reading.source.path,
        locator="dump",
        kind="fr.dump",
        fields=json.dumps(fields),
        quote=f"Flight Recorder {reading.version or 'of torch 2.2'}, {len(dump.entries)} entries",
    )


def _own_rank(path: str, groups: dict[str, Group], problems: list[str]) -> int | None:
    """The rank of the name, checked against the groups, which all hold their own rank."""
    named = rank_of_name(path)
    lists = [set(g.ranks) for g in groups.values() if g.ranks]
    common = set.intersection(*lists) if lists else set()
    if named is None and len(common) == 1:
        problems.append("the name states no rank; taken from the groups, which share one rank")
        return next(iter(common))
    if named is None:
        problems.append("no rank: the file's name states none (such as trace_3)")
    elif lists and not any(named in ranks for ranks in lists):
        problems.append(f"rank {named} of the file's name is in none of the dump's groups")
    return named


def _default_size(groups: dict[str, Group]) -> int | None:
    sizes = [
        len(g.ranks) for g in groups.values() if g.ranks and axis_word(g.description) == "world"
    ]
    return max(sizes, default=None)


def read(artifact: Artifact) -> Reading:
    """Rows of one dump; a file that is none yields a Source that says why."""
    try:
        data, broken = artifact.data(BYTES)
        dump = decode(data)
    except (TooLargeError, NotADumpError) as wrong:
        return Reading(Source(artifact.path, KIND, "none", (str(wrong),)))
    problems = [*dump.problems, *([broken] if broken else [])]
    groups = groups_of(dump)
    rank = _own_rank(artifact.path, groups, problems)
    whole = dump.whole and broken is None
    source = Source(artifact.path, KIND, "all" if whole else "part", tuple(problems))
    reading = FlightReading(source, world_size=_default_size(groups), rank=rank)
    reading.version = str(dump.top.get("version", ""))[:20]
    reading.encoding = dump.encoding
    keys = {name: key(g) for name, g in groups.items()}
    reading.names = {keys[name]: g for name, g in groups.items()}
    backends = _backends(dump)
    for name, group in groups.items():
        reading.add(
            "groups",
            group_id=keys[name],
            name=group.description if group.description not in ("", "undefined") else name,
            axis=axis_word(group.description),
            ranks=None if group.ranks is None else list(group.ranks),
            backend=backends.get(name),
        )
    rows = _Rows(reading, groups, keys)
    for position, entry in enumerate(dump.entries):
        rows.collective(position, entry)
    _statuses(reading, dump, keys)
    _summary(reading, dump)
    made = reading.rows.get("collectives", [])
    reading.signature = tuple((r["group_id"], r["seq"], r["op"], r["issue_ns"]) for r in made)
    return reading
