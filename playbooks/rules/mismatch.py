"""Members of a group that issued different operations: hang.collective-mismatch, -extra.

In: the ledger aligned by (group, seq), and the fingerprints that torch prints with DETAIL. Out: one
root finding for the earliest difference. Culprits are the minority; the order of ranks, files and
rows decides nothing. When taking k entries of the minority out makes the sequences agree again, it
is an insertion: an extra collective.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from collectors.c10d import dtype_word, op_word
from playbooks import logs
from playbooks.finding import Confidence, Finding, Item
from playbooks.words import clock, ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.ledger import Call, Ledger
    from playbooks.policy import Policy

_FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d+), )?OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\])?"
    r"(?:, TensorDtypes=(\w+))?"
)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The earliest difference in the ledger, else what the fingerprints say."""
    calls = first_difference(evidence.ledger)
    return [_finding(evidence, policy, calls)] if calls else _from_fingerprints(evidence)


def first_difference(ledger: Ledger) -> list[Call]:
    """What the members brought to the earliest collective in which they differ."""
    numbers = ledger.differing
    if not numbers.size:
        return []
    found = ledger.instances
    when = [_first_issue(ledger, found.rows_of(int(n))) for n in numbers]
    first = int(numbers[int(np.argmin(when))])
    return [ledger.call(int(row)) for row in found.rows_of(first)]


def ahead(calls: list[Call], ranks: tuple[int, ...]) -> bool:
    """Whether these ranks are in a later step than the other members, who are in one step."""
    own = {c.step for c in calls if c.rank in ranks}
    rest = {c.step for c in calls if c.rank not in ranks}
    if len(rest) != 1 or None in own | rest or not own:
        return False
    return min(step for step in own if step is not None) > max(s for s in rest if s is not None)


def _first_issue(ledger: Ledger, rows: np.ndarray) -> int:
    issue = ledger.issue[rows]
    return int(issue[issue >= 0].min()) if (issue >= 0).any() else np.iinfo(np.int64).max


def split(calls: list[Call], policy: Policy) -> tuple[tuple[int, ...], bool]:
    """(culprits, whether a majority stands against them)."""
    signatures = {c.rank: c.signature for c in calls}
    weight = Counter(signatures.values())
    majority, size = weight.most_common(1)[0]
    if size > policy.minority_share * len(signatures):
        return tuple(sorted(r for r, s in signatures.items() if s != majority)), True
    return tuple(sorted(signatures)), False


def _finding(evidence: Evidence, policy: Policy, calls: list[Call]) -> Finding:
    group = evidence.groups[calls[0].group]
    seq = calls[0].seq
    ranks, decided = split(calls, policy)
    odd = [c for c in calls if c.rank in ranks]
    rest = [c for c in calls if c.rank not in ranks]
    absent = sorted(set(group.members) - {c.rank for c in calls})
    # A rank in a later step has left something out before: why, this difference does not tell.
    sure = decided and not absent and not ahead(calls, ranks)
    confidence: Confidence = "certain" if sure else "likely"
    issued = [c.issue_ns for c in calls if c.issue_ns is not None]
    items = [_item(c) for c in odd[:3]] + [_item(c) for c in rest[:2]]
    base = Finding(
        "hang.collective-mismatch",
        "root",
        confidence,
        _sentence(group.label, seq, ranks, odd, rest),
        ranks=ranks,
        group=group.label,
        axis=None if group.axis == "unknown" else group.axis,
        evidence=tuple(items[: policy.evidence_most]),
        at_ns=min(issued) if issued else None,
    )
    if decided and rest:
        surplus = _insertion(evidence.ledger, odd, rest[0], policy)
        if surplus:
            return base.but(
                cause="hang.collective-extra",
                confidence="likely",
                summary=(
                    f"{ranks_words(ranks, capital=True)} issued {odd[0].words()} #{seq} of "
                    f"{group.label}, which the other members never will: without it their "
                    "sequences agree."
                ),
                formula=f"sequence from #{seq + surplus} on = the others' from #{seq} on",
                excluded=(
                    ("hang.collective-mismatch", "taking it out makes all later operations equal"),
                ),
            )
    differ = ("hang.transport", "the signatures differ")
    if decided and rest and not _follows(evidence.ledger, odd[0], policy):
        # Another operation with nothing after it may be one too many as well as one in place.
        other = odd[0].op != rest[0].op
        guarded = _guarded(evidence, ranks, group.members, odd, rest) or _between_steps(
            evidence, ranks, group.members, odd, rest
        )
        if other and guarded:
            return base.but(
                cause="hang.collective-extra",
                confidence="likely",
                summary=(
                    f"{ranks_words(ranks, capital=True)}, {guarded}, issued {odd[0].words()} "
                    f"#{seq} of {group.label} from code of their own; the other members brought "
                    f"{rest[0].words()} and will not come to it."
                ),
                excluded=(
                    ("hang.collective-mismatch", "it comes from code that the others never run"),
                    differ,
                ),
            )
        return base.but(excluded=(differ,), confidence="likely" if other else confidence)
    return base.but(
        excluded=(differ, ("hang.collective-extra", "no shift makes the sequences agree"))
    )


def _between_steps(
    evidence: Evidence,
    ranks: tuple[int, ...],
    members: tuple[int, ...],
    odd: list[Call],
    rest: list[Call],
) -> str | None:
    """What the culprit is by role, when it issued the operation between two steps and the others
    are in the next one: they have passed that place without it."""
    (one, *more), line = odd, evidence.timeline
    if ranks != (min(members),) or more or one.step is None or one.rank not in line.ranks:
        return None
    ended = line.end_ns[line.ranks.index(one.rank), line.steps == one.step]
    between = ended.size and 0 <= ended[0] <= (one.issue_ns or -1)
    later = all(c.step is not None and c.step > one.step for c in rest)
    return f"rank {one.rank} alone, between two steps" if between and later else None


def _guarded(
    evidence: Evidence,
    ranks: tuple[int, ...],
    members: tuple[int, ...],
    odd: list[Call],
    rest: list[Call],
) -> str | None:
    """What the culprits are by role (rank 0, the first of each node), when code of a role that the
    others never passed issued the operation: an `if rank == 0:` around a collective."""
    own, others = _issuing(evidence, odd), _issuing(evidence, rest)
    if None in own | others or own & others:
        return None
    if ranks == (min(members),):
        return f"rank {ranks[0]} alone"
    apart = {b - a for a, b in pairwise(ranks)}
    (gap,) = apart if len(apart) == 1 else (0,)
    if gap >= 2 and ranks[0] == min(members) and len(ranks) * gap == len(members):
        return f"one of every {gap} ranks"
    return None


def _issuing(evidence: Evidence, calls: list[Call]) -> set[tuple[str, ...] | None]:
    """Frames of the program that issued these calls; None for one whose dump does not tell them."""
    column = evidence.collected.tables["collectives"].column("stack_id")
    stacks = evidence.collected.tables["stacks"].column("frames")
    out: set[tuple[str, ...] | None] = set()
    for call in calls:
        one = column[call.row].as_py()
        told = stacks[one].as_py() if one is not None and 0 <= one < len(stacks) else None
        out.add(tuple(f for f in told if "site-packages" not in f) if told else None)
    return out


def _sentence(
    label: str, seq: int, ranks: tuple[int, ...], odd: list[Call], rest: list[Call]
) -> str:
    if rest:
        return (
            f"{ranks_words(ranks, capital=True)} joined collective #{seq} of {label} with "
            f"{odd[0].words()}, while {ranks_words(c.rank for c in rest)} brought "
            f"{rest[0].words()}."
        )
    forms = Counter(c.words() for c in odd)
    listed = " against ".join(f"{form} ({n} ranks)" for form, n in sorted(forms.items()))
    return f"The members of {label} joined collective #{seq} with different arguments: {listed}."


def _item(call: Call) -> Item:
    when = "" if call.issue_ns is None else f" at {clock(call.issue_ns)}"
    return Item(
        call.source, call.locator, f"rank {call.rank} issued {call.words()} as #{call.seq}{when}"
    )


def _follows(ledger: Ledger, odd: Call, policy: Policy) -> bool:
    """Whether the culprit issued enough after it to try whether a shift makes all agree."""
    return len(_sequence(ledger, odd, policy)) > policy.insertion_overlap


def _insertion(ledger: Ledger, odd: list[Call], normal: Call, policy: Policy) -> int:
    """How many entries of the culprits are surplus; 0 when it is no insertion."""
    mine = _sequence(ledger, odd[0], policy)
    other = _sequence(ledger, normal, policy)
    for surplus in range(1, policy.insertion_most + 1):
        shifted = mine[surplus:]
        overlap = min(len(shifted), len(other))
        aligned = shifted[:overlap] == other[:overlap]
        # A substitution in a row of equal operations would align shifted and unshifted alike.
        substituted = shifted[:overlap] == other[surplus : surplus + overlap]
        if overlap >= policy.insertion_overlap and aligned and not substituted:
            return surplus
    return 0


def _sequence(ledger: Ledger, call: Call, policy: Policy) -> list[object]:
    """Signatures of one rank in one group from `call` on."""
    rows = np.flatnonzero(
        (ledger.group == call.group)
        & (ledger.rank == call.rank)
        & ~ledger.p2p
        & (ledger.seq >= call.seq)
    )
    rows = rows[np.argsort(ledger.seq[rows], kind="stable")]
    most = policy.insertion_most + 4 * policy.insertion_overlap
    return [ledger.call(int(row)).signature for row in rows[:most]]


def _fingerprints(evidence: Evidence) -> tuple[dict[int, str], list[Item], list[int]]:
    """Rank -> what it ran, from DETAIL's messages in exceptions and logs."""
    prints: dict[int, str] = {}
    items: list[Item] = []
    times: list[int] = []
    for one in evidence.raised:
        if one.kind.name != "mismatch":
            continue
        items.append(one.item)
        times += [one.at_ns] if one.at_ns is not None else []
        for rank, _seq, op, shape, dtype in _FINGERPRINT.findall(one.text):
            prints.setdefault(int(rank), f"{op_word(op)} {dtype_word(dtype)} [{shape}]")
    for row, fields in logs.events(evidence.collected, "c10d.mismatch"):
        items.append(logs.item(row))
        times += [row["time_ns"]] if row["time_ns"] is not None else []
        told = fields.get("fingerprints")
        for rank, body in (told if isinstance(told, dict) else {}).items():
            if rank.isdecimal() and isinstance(body, dict):
                dtype = dtype_word(str(body.get("dtypes") or ""))
                words = f"{body.get('op') or 'unknown'} {dtype} {body.get('shape') or '[]'}"
                prints.setdefault(int(rank), words)
    return prints, items, times


def _from_fingerprints(evidence: Evidence) -> list[Finding]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: every rank blames another; the odd fingerprint is it."""
    prints, items, times = _fingerprints(evidence)
    weight = Counter(prints.values())
    if len(weight) < 2:
        return []
    majority, most = weight.most_common(1)[0]
    decided = most > len(prints) / 2
    ranks = tuple(sorted(r for r, p in prints.items() if not decided or p != majority))
    seen = " against ".join(f"{words} ({n} ranks)" for words, n in weight.most_common())
    return [
        Finding(
            "hang.collective-mismatch",
            "root",
            "certain" if decided else "likely",
            f"{ranks_words(ranks, capital=True)} ran another collective than the other members: "
            f"{seen}.",
            ranks=ranks,
            evidence=tuple(items[:4]),
            excluded=(("crash.user-exception", "the exception is the check of the backend"),),
            at_ns=min(times) if times else None,
        )
    ]
