"""From findings to one answer: which root explains the most, and what follows from it.

In: findings of all rules. Out: the verdict (or None), all other findings as effects or context,
and what happened to the other ranks as effects. The order is the taxonomy's: the first cause in
time, dead before late, why it ended before that it ended, and a stopped job has no slow root. The
order in which rules or rows came decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbooks.finding import Finding
from playbooks.rules.common import SIGABRT
from playbooks.words import ranks_words, signal_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

_POLLED = ("hang.rank-died", "crash.native-fault", "oom.host")
"""Causes whose time is that of a process end, which is seen late."""
_PRECEDENCE = (
    ("hang.device-error", "crash.node-lost"),
    ("hang.exception-swallowed", "hang.uneven-inputs", "hang.gil-held"),
    ("hang.collective-mismatch", "hang.collective-extra"),
    ("crash.", "oom.", "config."),
    ("hang.rank-died",),
    ("hang.slow-not-dead",),
    ("hang.rank-stalled",),
    ("hang.",),
    ("slow.",),
    ("link.", "numeric."),
)
"""Between causes that time does not order. A mismatch stands first: it is in the ledger before the
aborts and garbage that follow from it, and what came before it has an earlier time."""
_ENDING = ("crash.", "oom.", "hang.rank-died")
"""Causes that end an attempt."""
_BEGIN_OF_WAIT = ("hang.rank-stalled", "hang.slow-not-dead", "hang.transport", "hang.gil-held")
"""Causes whose time is when others began to wait, which may be before what stopped the rank."""
_NAMED = ("config.", "link.", "numeric.", "slow.gpu-throttled")
"""Causes that an artifact names, and that look like another one from the ranks' side."""
_WORD = {"certain": 0, "likely": 1, "possible": 2}


def _rank(finding: Finding) -> int:
    for place, prefixes in enumerate(_PRECEDENCE):
        if finding.cause.startswith(prefixes):
            return place
    return len(_PRECEDENCE)


def _precedes(one: Finding, other: Finding, policy: Policy) -> bool:
    """Whether `one` clearly set in before `other`."""
    if one.at_ns is None or other.at_ns is None:
        return False
    if one.cause in _BEGIN_OF_WAIT and _rank(other) <= _rank(one):
        return False
    polled = one.cause in _POLLED or other.cause in _POLLED
    return one.at_ns + (policy.together_ns if polled else 0) < other.at_ns


def _order(finding: Finding) -> tuple[int, int, int, str, tuple[int, ...]]:
    return (
        _rank(finding),
        _WORD[finding.confidence],
        finding.at_ns or 0,
        finding.cause,
        finding.ranks,
    )


def choose(roots: Sequence[Finding], policy: Policy) -> Finding | None:
    """The root that explains the rest; None without roots."""
    surer = [r for r in roots if r.confidence != "possible"] or list(roots)
    surer = [r for r in surer if not any(_narrower(o, r, policy) for o in surer)] or surer
    # A job that stands still or broke off has no slow root: it would be the state before.
    broken = [r for r in surer if not r.cause.startswith(("slow.", "link."))]
    pool = broken or surer
    first = [r for r in pool if not any(_precedes(o, r, policy) for o in pool)]
    return min(first, key=_order, default=None)


def _overcome(finding: Finding, evidence: Evidence) -> Finding:
    """What stopped an earlier attempt of a job that ended well is context, not its verdict."""
    failed = any(end.signal or end.exit_code for end in evidence.ends)
    if not finding.cause.startswith(_ENDING) or failed or not evidence.finished_well:
        return finding
    return finding.but(role="context", caused_by=None)


def _modest(finding: Finding, evidence: Evidence, policy: Policy) -> Finding:
    """What was read from prose is no surer than such readings have proved to be."""
    weak = finding.cause in policy.read_from_prose and finding.role == "root"
    if not (evidence.loose and weak) or finding.confidence == "possible":
        return finding
    return finding.but(confidence="possible")


def _narrower(one: Finding, other: Finding, policy: Policy) -> bool:
    """Whether `one` says by a fact that what looks like `other` is itself."""
    named = one.cause.startswith(_NAMED) and other.cause in {c for c, _ in one.excluded}
    return named and not _precedes(other, one, policy)


def join(
    found: Sequence[Finding], evidence: Evidence, policy: Policy
) -> tuple[Finding | None, list[Finding]]:
    """(verdict, all findings with their final roles, the verdict first)."""
    found = [_modest(_overcome(f, evidence), evidence, policy) for f in found]
    roots = [f for f in found if f.role == "root"]
    verdict = choose(roots, policy)
    if verdict is None:
        return None, sorted(found, key=_order)
    out = [verdict]
    for finding in sorted(found, key=_order):
        if finding is verdict:
            continue
        if finding.role == "root":
            out.append(_demoted(finding, verdict, policy))
        elif finding.role == "effect" and finding.caused_by != verdict.cause:
            out.append(finding.but(role="context", caused_by=None))
        else:
            out.append(finding)
    out += _aftermath(verdict, evidence)
    return verdict, out


def _demoted(finding: Finding, verdict: Finding, policy: Policy) -> Finding:
    """Another root: an effect when the verdict can have caused it, else context."""
    static = finding.cause.startswith(("slow.", "link.", "config.", "numeric."))
    if static or _precedes(finding, verdict, policy):
        return finding.but(role="context")
    return finding.but(role="effect", caused_by=verdict.cause)


def _aftermath(verdict: Finding, evidence: Evidence) -> list[Finding]:
    """What happened to the other ranks, as effects: waits, errors of peers, signals."""
    if verdict.cause.startswith(("slow.", "link.", "numeric.")):
        return []
    out: list[Finding] = []
    told = set(verdict.ranks)
    errors: dict[str, list[int]] = {}
    for one in evidence.raised:
        if one.rank is None or one.rank in told or one.kind.name == "launcher":
            continue
        told.add(one.rank)
        errors.setdefault(_short(one.text), []).append(one.rank)
    for text, ranks in errors.items():
        out.append(
            _effect(
                verdict,
                "crash.user-exception",
                f"{ranks_words(ranks, capital=True)} then raised {text}.",
                [r.item for r in evidence.raised if r.rank in ranks][:1],
            )
        )
    signals: dict[int, list[int]] = {}
    for end in evidence.ends:
        if end.signal and end.rank not in told:
            signals.setdefault(end.signal, []).append(end.rank)
    for signal, ranks in sorted(signals.items()):
        cause = "crash.native-fault" if signal == SIGABRT else "hang.rank-died"
        out.append(
            _effect(
                verdict,
                cause,
                f"{ranks_words(ranks, capital=True)} then ended with {signal_name(signal)}.",
                [e.item for e in evidence.ends if e.rank in ranks][:1],
            )
        )
    return out + _waiting(verdict, evidence)


def _waiting(verdict: Finding, evidence: Evidence) -> list[Finding]:
    """Where the other ranks wait, one effect a group and operation."""
    if not evidence.stopped or not verdict.cause.startswith("hang."):
        return []
    if verdict.cause == "hang.transport":
        return []
    places: dict[tuple[str, str, int], list[int]] = {}
    for wait in evidence.waits.main():
        if wait.call.rank not in verdict.ranks:
            group = evidence.groups[wait.call.group].label
            places.setdefault((group, wait.call.op, wait.call.seq), []).append(wait.call.rank)
    return [
        _effect(
            verdict,
            "hang.transport",
            f"{ranks_words(ranks, capital=True)} {'waits' if len(ranks) == 1 else 'wait'} in "
            f"{op} #{seq} of {group}.",
            [],
        )
        for (group, op, seq), ranks in list(places.items())[:8]
    ]


def _short(text: str) -> str:
    """An error without the addresses that differ by rank."""
    kind = text.split(":", 1)[0]
    for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"):
        if words.lower() in text.lower():
            return f"{kind}: {words[0].lower()}{words[1:]}"
    return text if len(text) <= 160 else text[:159] + "…"


def _effect(verdict: Finding, cause: str, summary: str, items: list) -> Finding:  # type: ignore[type-arg]  # Items
    return Finding(
        cause, "effect", "certain", summary, evidence=tuple(items), caused_by=verdict.cause
    )
