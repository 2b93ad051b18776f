"""Processes that ended: hang.rank-died, crash.native-fault, oom.host.

In: ends of processes, exceptions, host samples. Out: at most one root finding. Never a root: ends
by the launcher's SIGTERM, SIGABRT without its own reason, and whatever ended after the job already
stood still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from playbooks import logs
from playbooks.finding import Finding, Item
from playbooks.rules import host_memory
from playbooks.rules.common import (
    SIGABRT,
    SIGINT,
    SIGKILL,
    SIGTERM,
    is_after_the_fact,
    phase_item,
    where_was,
)
from playbooks.words import count, ranks_words, signal_name, size

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.facts import End
    from playbooks.policy import Policy

FAULTS = (4, 7, 8, 11)
"""SIGILL, SIGBUS, SIGFPE, SIGSEGV: raised by the process's own instructions."""
_EFFECTS = (SIGINT, SIGABRT, SIGTERM)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The earliest end that needs an explanation of its own."""
    first = _first(evidence, policy)
    if not first:
        return []
    kind = first[0].signal
    if kind in FAULTS:
        return [_native(evidence, first)]
    memory = _memory_record(evidence, policy, first) if kind == SIGKILL else None
    if memory is not None:
        return [_host_memory(evidence, first, *memory)]
    return [_died(evidence, policy, first)]


def _unexplained(evidence: Evidence, end: End) -> bool:
    """Whether this end asks for an explanation: killed, crashed, or gone without a word."""
    if end.signal:
        return end.signal not in _EFFECTS
    if any(r.rank in (None, end.rank) and r.kind.name != "launcher" for r in evidence.raised):
        return False
    if end.exit_code == 0:
        # os._exit(0) in the middle; a regular exit may be the end of its data instead.
        return end.closed is False and end.rank in evidence.waits.ends()
    if end.exit_code is not None:
        # In loose logs an exit code without a traceback means that the traceback is elsewhere.
        return not evidence.loose
    # Nobody saw the exit code. A log that was not closed means that the interpreter did not exit.
    return end.closed is False and not evidence.interrupted


def _first(evidence: Evidence, policy: Policy) -> list[End]:
    """The earliest unexplained ends: those that nothing orders and that ended alike."""
    found = [
        e
        for e in evidence.ends
        if _unexplained(evidence, e) and not is_after_the_fact(evidence, policy, e.at_ns)
    ]
    # A signal is a fact; "no exit code on record" is the lack of one.
    found = [e for e in found if e.signal] or [e for e in found if e.exit_code is not None] or found
    if not found:
        return []
    timed = [e for e in found if e.at_ns is not None]
    if timed:
        start = min(e.at_ns or 0 for e in timed)
        found = [e for e in timed if (e.at_ns or 0) <= start + policy.together_ns]
    # Its own fault signal says more than a SIGKILL of the same moment.
    faults = [e for e in found if e.signal in FAULTS]
    found = faults or found
    alike = [e for e in found if e.signal == found[0].signal]
    if len(alike) > 1:
        awaited = set(evidence.waits.ends())
        alike = [e for e in alike if e.rank in awaited] or alike
    return alike


def _survivors(evidence: Evidence, dead: list[End]) -> list[int]:
    return sorted(evidence.seen - {e.rank for e in dead})


def _consequences(evidence: Evidence, dead: list[End]) -> list[Item]:
    """What the peers saw: their first errors, and the operation in which the dead are missing."""
    ranks = {e.rank for e in dead}
    items = [
        r.item
        for r in evidence.raised
        if r.rank not in ranks and r.kind.name in ("peer", "timeout")
    ][:1]
    for wait in evidence.waits.waits:
        if ranks & set(wait.absent):
            call = wait.call
            group = evidence.groups[call.group].label
            text = (
                f"{ranks_words([call.rank])} was in {call.op} #{call.seq} of {group}, "
                f"which {ranks_words(sorted(ranks & set(wait.absent)))} never entered"
            )
            items.append(Item(call.source, call.locator, text))
            break
    return items


def _died(evidence: Evidence, policy: Policy, dead: list[End]) -> Finding:
    ranks = tuple(sorted(e.rank for e in dead))
    end = dead[0]
    others = _survivors(evidence, dead)
    proof = _consequences(evidence, dead)
    timed = end.at_ns is not None
    only = sum(1 for e in evidence.ends if e.signal == SIGKILL) == len(dead)
    known = end.signal is not None
    confidence = "certain" if known and (timed or only) and len(dead) == 1 else "likely"
    if not known and not proof and end.exit_code is None:
        confidence = "possible"
    how = (
        f"was killed by {signal_name(end.signal)}"
        if end.signal
        else f"ended with {end.words} and no traceback"
    )
    lost = f"; its {count(len(others), 'peer')} still needed it" if others else ""
    where = where_was(evidence, ranks[0]) if len(ranks) == 1 else ""
    text = f"{ranks_words(ranks, capital=True)} {how}{where}, and nothing on record says why{lost}."
    excluded = [
        ("hang.rank-stalled", "its process no longer exists"),
        ("crash.user-exception", "it left no traceback"),
    ]
    facts = _memory_facts(evidence, end.host, end.at_ns, policy)
    if end.signal == SIGKILL and facts is not None:
        excluded.insert(0, ("oom.host", facts[1]))
    items = [e.item for e in dead] + [i for r in ranks for i in phase_item(evidence, r)] + proof
    return Finding(
        "hang.rank-died",
        "root",
        confidence,  # type: ignore[arg-type]  # one of three words, chosen above
        text,
        ranks=ranks,
        evidence=tuple(items[: policy.evidence_most]),
        excluded=tuple(excluded),
        at_ns=end.at_ns,
    )


def _native(evidence: Evidence, dead: list[End]) -> Finding:
    ranks = tuple(sorted(e.rank for e in dead))
    end = dead[0]
    name = signal_name(end.signal or 0)
    where = where_was(evidence, ranks[0]) if len(ranks) == 1 else ""
    others = _survivors(evidence, dead)
    lost = f"; {count(len(others), 'peer')} lost it" if others else ""
    text = (
        f"{ranks_words(ranks, capital=True)} crashed with signal {end.signal} ({name})"
        f"{where}, inside native code{lost}."
    )
    items = [e.item for e in dead] + [i for r in ranks for i in phase_item(evidence, r)]
    return Finding(
        "crash.native-fault",
        "root",
        "likely" if end.signal == 7 else "certain",
        text,
        ranks=ranks,
        evidence=(*items, *_consequences(evidence, dead)),
        excluded=(("hang.rank-died", "its own instruction raised the signal"),),
        at_ns=end.at_ns,
    )


def _memory_facts(
    evidence: Evidence, host: str | None, at_ns: int | None, policy: Policy
) -> tuple[bool, str, bool] | None:
    """(memory did it, sentence, the kernel counted it) from host samples; None without samples."""
    data = evidence.collected
    names = data.texts("hosts", "host")
    here = np.array([host is None or name == host for name in names], bool)
    time_ns = data.ints("hosts", "time_ns")
    if at_ns is not None:
        here &= time_ns <= at_ns + policy.together_ns
    if not here.any():
        return None
    kills = data.ints("hosts", "oom_kills")[here]
    kills = kills[kills >= 0]
    if kills.size >= 2 and kills.max() > kills.min():
        grown = int(kills.max() - kills.min())
        return True, f"the cgroup counted {count(grown, 'memory kill')} meanwhile", True
    used = data.ints("hosts", "memory_used")[here]
    total = data.ints("hosts", "memory_total")[here]
    near = (used >= 0) & (total > 0)
    if at_ns is not None:
        near &= time_ns[here] >= at_ns - policy.host_full_before_ns
    if not near.any():
        return None
    share = used[near] / total[near]
    top = float(share.max())
    text = f"host memory was at most {top:.0%} of {size(int(total[near].max()))} full before it"
    return top >= policy.host_full_share, text, False


def _memory_record(
    evidence: Evidence, policy: Policy, dead: list[End]
) -> tuple[str, bool, list[Item]] | None:
    """(sentence, certain, items) when something on record says memory, else None."""
    pids = {evidence.rank_rows[e.rank]["pid"] for e in dead if e.rank in evidence.rank_rows}
    for row, fields in host_memory.records(evidence):
        if fields.get("pid") is None or not pids or fields["pid"] in pids:
            return "a record says that memory ran out", True, [logs.item(row)]
    facts = _memory_facts(evidence, dead[0].host, dead[0].at_ns, policy)
    if facts is None or not facts[0]:
        return None
    return facts[1], facts[2], [Item("hosts", dead[0].host or "host samples", facts[1])]


def _host_memory(
    evidence: Evidence, dead: list[End], why: str, certain: bool, items: list[Item]
) -> Finding:
    ranks = tuple(sorted(e.rank for e in dead))
    where = where_was(evidence, ranks[0]) if len(ranks) == 1 else ""
    text = f"{ranks_words(ranks, capital=True)} was killed by SIGKILL{where} when {why}."
    return Finding(
        "oom.host",
        "root",
        "certain" if certain else "likely",
        text,
        ranks=ranks,
        evidence=(*[e.item for e in dead], *items),
        excluded=(("hang.rank-died", "a record says memory"),),
        at_ns=dead[0].at_ns,
    )
