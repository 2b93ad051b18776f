"""A job that stands still while all its processes live: hang.rank-stalled, hang.slow-not-dead.

In: who waits for whom, open phases, two looks at the stacks. Out: one root finding that names the
ranks at the end of the chains of waits, or a context finding when the job went on. A rank without
any sign of life is never named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.finding import Confidence, Finding, Item
from playbooks.rules.common import is_in_operation, phase_item
from playbooks.words import clock, ranks_words, seconds

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.facts import Stack
    from playbooks.ledger import Call
    from playbooks.policy import Policy

WHERE = {
    "data": "data",
    "h2d": "data",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "compile": "compile",
    "forward": "user-code",
    "backward": "user-code",
    "optimizer": "user-code",
    "other": "user-code",
}
"""Phase -> `where` of the taxonomy."""
_PLACES = (
    ("data", ("dataloader", "/data.py", "dataset", "next_batch", "_next_data", "fetch.py")),
    ("checkpoint", ("checkpoint", "serialization", "torch.save", "save_state")),
    ("compile", ("_inductor", "_dynamo", "cpp_extension", "file_baton")),
    ("evaluation", ("evaluate", "validation", "eval.py")),
)
_WORDS = {
    "data": "stuck reading its data",
    "checkpoint": "stuck in its checkpoint",
    "evaluation": "stuck in evaluation",
    "compile": "stuck compiling",
    "user-code": "stuck in the program's own code",
    "unknown": "stuck outside any collective",
}


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Name the ranks that wait for nobody while others wait for them."""
    if evidence.resumed_ns is not None:
        return [_went_on(evidence)]
    if not evidence.stopped:
        return []
    waiting = {r: w for r, w in evidence.waits.ends().items() if not is_in_operation(evidence, r)}
    if evidence.gone & waiting.keys():
        return []
    ranks = tuple(sorted(waiting)) if waiting else _all_outside(evidence)
    if any(rank not in evidence.seen or _left(evidence, policy, rank) for rank in ranks):
        return []
    if not ranks:
        return []
    return [_finding(evidence, policy, ranks)]


def _left(evidence: Evidence, policy: Policy, rank: int) -> bool:
    """Whether it ended well later, clearly before anybody was made to end: it was not stuck."""
    end = next((e for e in evidence.ends if e.rank == rank), None)
    if end is None or end.at_ns is None or end.exit_code != 0:
        return False
    made = [e.at_ns for e in evidence.ends if e.signal and e.at_ns is not None]
    return all(at_ns > end.at_ns + policy.together_ns for at_ns in made)


def _all_outside(evidence: Evidence) -> tuple[int, ...]:
    """All living ranks, when none is in an operation and all are in one kind of phase."""
    living = evidence.seen - evidence.gone
    phases = {r: p for r, p in evidence.open_phases.items() if r in living}
    if evidence.waits.waits or not living or set(phases) != living:
        return ()
    kinds = {WHERE.get(p.phase) for p in phases.values()}
    return tuple(sorted(living)) if len(kinds) == 1 and None not in kinds else ()


def _where(evidence: Evidence, rank: int) -> str:
    """Of the open phase where that says something, else of the frames."""
    phase = evidence.open_phases.get(rank)
    told = WHERE.get(phase.phase, "unknown") if phase is not None else "unknown"
    if told not in ("unknown", "user-code"):
        return told
    looks = evidence.stacks.get(rank) or []
    text = "\n".join(looks[-1].frames).lower() if looks else ""
    return next((w for w, marks in _PLACES if any(m in text for m in marks)), told)


def _worked(evidence: Evidence, policy: Policy, rank: int) -> bool:
    """Whether its process used the processor between the looks, as no sleeping one does."""
    looks = evidence.stacks.get(rank) or []
    used = [s.cpu_share for s in looks if s.cpu_share is not None]
    return max(used, default=0.0) >= policy.working_cpu


def _moved(evidence: Evidence, policy: Policy, rank: int) -> bool | None:
    """Whether the rank did something between two looks; None without two looks."""
    looks = evidence.stacks.get(rank) or []
    if len(looks) < 2:
        return None
    return looks[0].places != looks[-1].places or _worked(evidence, policy, rank)


def _confidence(evidence: Evidence, moved: list[bool | None]) -> Confidence:
    """Two looks that agree decide; one look is at most likely."""
    if all(m is False for m in moved):
        return "certain"
    timed_out = bool(evidence.ledger.failed.any()) or any(
        r.kind.name == "timeout" for r in evidence.raised
    )
    return "likely" if evidence.hang is not None or timed_out else "possible"


def _awaited(evidence: Evidence, ranks: tuple[int, ...]) -> Call | None:
    """The operation in which others wait for these ranks, the earliest."""
    calls = [w.call for w in evidence.waits.main() if set(w.absent) & set(ranks)]
    return min(calls, key=lambda c: (c.issue_ns is None, c.issue_ns or 0), default=None)


def _finding(evidence: Evidence, policy: Policy, ranks: tuple[int, ...]) -> Finding:
    moved = [_moved(evidence, policy, r) for r in ranks]
    wheres = {_where(evidence, r) for r in ranks}
    where = wheres.pop() if len(wheres) == 1 else "unknown"
    call = _awaited(evidence, ranks)
    group = None if call is None else evidence.groups[call.group]
    since = (evidence.hang or {}).get("since_ns") or (call.issue_ns if call else None)
    tail = f"{_duration(evidence)}{_behind(evidence, ranks)}"
    who = ranks_words(ranks, capital=True)
    verb = "is" if len(ranks) == 1 else "are"
    finding = Finding(
        "hang.rank-stalled",
        "root",
        _confidence(evidence, moved),
        f"{who} {verb} {_WORDS[where]}{tail}.",
        ranks=ranks,
        group=None if group is None else group.label,
        axis=None if group is None or group.axis == "unknown" else group.axis,
        where=None if where == "unknown" else where,
        evidence=tuple(_items(evidence, policy, ranks, call)[: policy.evidence_most]),
        excluded=(("hang.rank-died", "the process is there"),),
        at_ns=since,
    )
    if any(moved):
        return finding.but(
            cause="hang.slow-not-dead",
            confidence="likely",
            summary=f"{who} {verb} late but at work{tail}.",
            where=finding.where
            if where in ("data", "checkpoint", "evaluation", "compile")
            else None,
            excluded=(("hang.rank-stalled", _how_moved(evidence, ranks)),),
        )
    if all(m is False for m in moved):
        same = ("hang.slow-not-dead", "nothing moved between two looks at its stack")
        return finding.but(excluded=(*finding.excluded, same))
    return finding


def _duration(evidence: Evidence) -> str:
    hang = evidence.hang or {}
    since, seen = hang.get("since_ns"), hang.get("verdict_ns") or hang.get("detected_ns")
    return f" for {seconds((seen - since) / 1e9)}" if since and seen and seen > since else ""


def _behind(evidence: Evidence, ranks: tuple[int, ...]) -> str:
    """ "; the other 7 ranks wait for it"."""
    waiters = {w for rank in ranks for w in evidence.waits.ends().get(rank, ())}
    if not waiters:
        return ""
    them = "it" if len(ranks) == 1 else "them"
    if waiters == evidence.seen - set(ranks) and len(waiters) > 1:
        return f"; the other {len(waiters)} ranks wait for {them}"
    return f"; {ranks_words(waiters)} {'waits' if len(waiters) == 1 else 'wait'} for {them}"


def _items(
    evidence: Evidence, policy: Policy, ranks: tuple[int, ...], call: Call | None
) -> list[Item]:
    items = []
    if call is not None:
        group = evidence.groups[call.group].label
        entered = sorted(
            w.call.rank
            for w in evidence.waits.waits
            if (w.call.group, w.call.seq, w.call.op) == (call.group, call.seq, call.op)
        )
        when = "" if call.issue_ns is None else f" at {clock(call.issue_ns)}"
        text = f"{ranks_words(entered)} entered {call.op} #{call.seq} of {group}{when}"
        items.append(Item(call.source, call.locator, f"{text}; {ranks_words(ranks)} did not"))
    for rank in ranks[:3]:
        items += phase_item(evidence, rank)
        looks = evidence.stacks.get(rank) or []
        if looks:
            same = _looked(looks)
            if _worked(evidence, policy, rank):
                share = max(s.cpu_share for s in looks if s.cpu_share is not None)
                same += f", {share:.0%} of a core used between them"
            text = f"main thread of rank {rank} ({same}): {' <- '.join(looks[-1].frames[:3])}"
            items.append(Item(looks[-1].item.source, looks[-1].item.locator, text))
    return items + evidence.hang_items


def _how_moved(evidence: Evidence, ranks: tuple[int, ...]) -> str:
    for rank in ranks:
        looks = evidence.stacks.get(rank) or []
        if len(looks) > 1 and looks[0].places != looks[-1].places:
            return "its frames changed between two looks"
    share = max(s.cpu_share or 0.0 for r in ranks for s in evidence.stacks.get(r) or [])
    return f"its process used {share:.0%} of a core between two looks; a sleeping one uses none"


def _looked(looks: list[Stack]) -> str:
    if len(looks) < 2:
        return "one look"
    same = looks[0].places == looks[-1].places
    return "the same in two looks" if same else "changed between two looks"


def _went_on(evidence: Evidence) -> Finding:
    hang = evidence.hang or {}
    start = hang.get("since_ns") or hang.get("detected_ns") or 0
    lasted = seconds(((evidence.resumed_ns or 0) - start) / 1e9)
    return Finding(
        "hang.slow-not-dead",
        "context",
        "certain",
        f"No rank made progress for {lasted}, then the job went on by itself.",
        evidence=tuple(evidence.hang_items),
        at_ns=start or None,
    )
