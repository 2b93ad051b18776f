"""A GPU, its memory or its NVLink that failed: hang.device-error.

In: Xid and SXid lines of kernel logs, the communicators' bus ids, pids of ranks, the job's first
failure. Out: one root finding with the ranks on the failed devices. Xids of the program's own
faults (13, 31), consequences (43, 45) and faults outside the job's time are no device errors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from playbooks import logs
from playbooks.finding import Confidence, Finding
from playbooks.policy import SECOND
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

_HARDWARE = {48, 64, 74, 79, 94, 95, 119, 120, 140, *range(143, 151)}
_WHY = {79: "off-bus", 74: "nvlink-fatal", 119: "gsp", 120: "gsp"} | dict.fromkeys(
    (48, 64, 94, 95, 140), "ecc"
)
_WORDS = {
    "off-bus": "fell off the bus",
    "ecc": "had an uncorrectable memory error",
    "nvlink-fatal": "had a fatal NVLink error",
    "gsp": "stopped answering its driver (GSP)",
    "other": "failed",
}
_RESTART = re.compile(r"reset required|reboot|drain|reset the gpu", re.IGNORECASE)
_NONE_NEEDED = re.compile(r"\bnone\b", re.IGNORECASE)
_DAY = 86_400 * SECOND


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The earliest hardware fault within the job, before its first failure."""
    faults = _faults(evidence, policy)
    if not faults or evidence.finished_well:
        return []
    hurt = bool(evidence.story.failures) or evidence.stopped or bool(evidence.raised)
    known = bool(evidence.seen) or bool(evidence.story.steps)
    if known and not hurt:
        return []
    placed = [(row, fields, _ranks(evidence, row, fields)) for row, fields in faults]
    ours = [p for p in placed if p[2]]
    if not ours and _foreign(evidence, faults):
        return []
    return [_finding(evidence, policy, ours or placed)]


def _faults(evidence: Evidence, policy: Policy) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Hardware-class events of the job's time, those of the earliest moment first."""
    first, begin = _first_failure(evidence), _begin(evidence)
    out = []
    for row, fields in evidence.story.of("kernel.xid", "kernel.sxid"):
        number = fields.get("xid")
        text = str(fields.get("message") or "")
        hard = number in _HARDWARE or row["kind"] == "kernel.sxid"
        if number == 154:
            hard = bool(_RESTART.search(text)) and not _NONE_NEEDED.search(text)
        at = row["time_ns"]
        late = at is not None and first is not None and at > first + policy.together_ns
        early = at is not None and begin is not None and at < begin
        if hard and not late and not early:
            out.append((row, fields))
    return sorted(out, key=lambda f: (f[0]["time_ns"] is None, f[0]["time_ns"] or 0))


def _first_failure(evidence: Evidence) -> int | None:
    rows = [r for r in evidence.story.failures if not r["kind"].startswith("python.")]
    times = [int(r["time_ns"]) for r in rows[:1]]
    times += [r.at_ns for r in evidence.raised if r.at_ns is not None]
    times += [e.at_ns for e in evidence.ends if e.at_ns is not None]
    return int(min(times)) if times else None


def _begin(evidence: Evidence) -> int | None:
    """A minute before the job is first seen; a day before its first failure when nothing tells."""
    issued = evidence.collected.ints("collectives", "issue_ns")
    times = [int(issued[issued > 0].min())] if (issued > 0).any() else []
    times += [t for t, _step, _row in evidence.story.steps[:1]]
    times += [
        row["time_ns"]
        for row, _ in evidence.story.of("nccl-info.comm", "rank.pid")
        if row["time_ns"] is not None
    ]
    if times:
        return int(min(times)) - 60 * SECOND
    first = _first_failure(evidence)
    return None if first is None else first - _DAY


def _bus(text: object) -> int | None:
    """Domain and bus number of "0000:ab:00", "0000:ab:00.0" or NCCL's "ab000"."""
    if not isinstance(text, str):
        return None
    parts = text.split(":")
    try:
        if len(parts) >= 2:
            domain = int(parts[-3], 16) if len(parts) >= 3 and len(parts[-3]) else 0
            return domain << 8 | int(parts[-2], 16)
        return int(text, 16) >> 12
    except ValueError:
        return None


def _host(evidence: Evidence, row: dict[str, Any]) -> str | None:
    """Host of a kernel line: its own, else the known host that the file's name holds."""
    if row["host"]:
        return str(row["host"])
    name = str(row["source"] or "").rsplit("/", 1)[-1]
    known = {str(r["host"]) for r in evidence.story.rows if r["host"]} | set(
        evidence.hosts.values()
    )
    fits = [
        h
        for h in known
        if _short(h) and re.search(rf"(?<![\w-]){re.escape(_short(h))}(?![\w-])", name)
    ]
    return max(fits, key=len) if fits else None


def _short(host: str) -> str:
    return host.split(".", maxsplit=1)[0]


def _same(a: str | None, b: str | None) -> bool:
    return a is None or b is None or _short(a) == _short(b)


def _ranks(evidence: Evidence, row: dict[str, Any], fields: dict[str, Any]) -> set[int]:
    """Ranks on the device, by its bus, else by the process that the line names."""
    host, bus = _host(evidence, row), _bus(fields.get("pci"))
    out = set()
    for comm, told in evidence.story.of("nccl-info.comm"):
        here = bus is not None and _bus(told.get("bus_id")) == bus
        if comm["rank"] is not None and here and _same(host, comm["host"] or told.get("host")):
            out.add(comm["rank"])
    if out:
        # Without a host on either side the same bus exists on every node.
        return out if len(out) == 1 or host is not None else set()
    pid = fields.get("pid")
    if pid is None:
        return set()
    return {
        r
        for r, known in evidence.rank_rows.items()
        if known["pid"] == pid and _same(host, known["host"])
    }


def _foreign(evidence: Evidence, faults: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Whether the faults lie on hosts that are known not to be the job's."""
    ours = {_short(h) for h in evidence.hosts.values()}
    theirs = {_short(h) for row, _ in faults if (h := _host(evidence, row)) is not None}
    return bool(ours) and bool(theirs) and not ours & theirs


def _finding(
    evidence: Evidence,
    policy: Policy,
    placed: list[tuple[dict[str, Any], dict[str, Any], set[int]]],
) -> Finding:
    ranks = tuple(sorted({r for _row, _fields, some in placed for r in some}))
    row, fields, _some = placed[0]
    fatal = row["kind"] == "kernel.sxid"
    why = "nvlink-fatal" if fatal else _WHY.get(int(fields["xid"]), "other")
    if 144 <= int(fields["xid"]) <= 150:
        why = "nvlink-fatal"
    host = _host(evidence, row)
    who = f" of {ranks_words(ranks)}" if ranks else ""
    confidence: Confidence = "certain" if ranks and row["time_ns"] is not None else "likely"
    rows = list({r["locator"]: r for r, _f, _s in placed}.values())
    items = [logs.item(r) for r in rows[:4]]
    items += [
        logs.item(comm)
        for comm, told in evidence.story.of("nccl-info.comm")
        if comm["rank"] in ranks and told.get("bus_id")
    ][:1]
    items += [logs.item(r) for r in evidence.story.failures[:1]]
    return Finding(
        "hang.device-error",
        "root",
        confidence,
        f"The GPU{who} at {fields.get('pci')}{f' on {host}' if host else ''} {_WORDS[why]}: "
        f"{'SXid' if fatal else 'Xid'} {fields['xid']} is in the kernel's log before the job's "
        "first failure.",
        ranks=ranks,
        where=why,
        evidence=tuple(items[: policy.evidence_most]),
        excluded=(
            ("hang.transport", "a device fault is on record first"),
            ("crash.kernel-error", "the Xid is of the hardware class"),
        ),
        at_ns=row["time_ns"],
    )
