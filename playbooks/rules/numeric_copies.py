"""Copies that must be equal and are not, or shards that must differ and do not.

In: digests and norms of weights, masks and random states by rank. Out: numeric.replicas-diverged,
numeric.gradient-reduction (one class of parameters), numeric.tp-rng, numeric.resume-state. Which
ranks hold copies is the layout's; values decide, words only say what is sharded.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from playbooks.measures.by_rank import apart, groups_of
from playbooks.measures.values import number
from playbooks.rules import numeric_drift, numeric_streams
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding, Item
    from playbooks.measures.by_rank import Spread
    from playbooks.measures.layout import Layout
    from playbooks.policy import Policy

_SHARDED = re.compile(
    r"(?i)\bshard|\bfsdp|zero[- ]?3|\bflat_?param|\blocal\b|\bcolumn|\brow[- ]par"
)
_COPIES = re.compile(
    r"(?i)\breplica|must be equal|must agree|\bunsharded|"
    r"\bfull (?:param|weight|state|cop)|\bcop(?:y|ies)"
)
_AFTER = re.compile(
    r"(?i)\bafter (?:\w+ )?(?:reduc|all-?reduc|sync|backward and)|\breduced\b|\bsynced|\breplicated"
)
_NORMS = re.compile(
    r"(?i)norm|\bsum|\bmean|\bstd|\bl2|\|+[wpg]|hash|sha\d*|crc|checksum|digest|fingerprint|"
    r"\bvalues?\b|_sum\b|\bfirst\b"
)
_AMOUNTS = re.compile(
    r"(?i)\b(?:GiB|MiB|KiB|GB|MB|bytes|memory|mem|numel|trainable|count|billion|million|tflops?)\b|"
    r"\d ?[GMK]i?B\b|\b\d+(?:\.\d+)?[BM] param"
)
_EXPERT = re.compile(r"(?i)experts?\b(?!.*router)")
_INIT = re.compile(r"(?i)\binit|construct|before (?:the )?(?:first )?step|after build|at start")
_NEAR = 64
"""Lines after a restart in which a first check is one of what was loaded."""


def rule(evidence: Evidence, _: Policy) -> list[Finding]:
    """Weights of replicas, of one class of copies, of shards; masks and random states."""
    spreads = evidence.measures.spreads
    if not spreads:
        return numeric_drift.rule(evidence)
    layout = evidence.measures.layout
    weights = [s for s in spreads if _measures_state(s)]
    tensor = numeric_streams.rule(spreads, layout)
    if tensor:
        return tensor
    return _weights(weights, layout) or numeric_drift.rule(evidence)


def _measures_state(spread: Spread) -> bool:
    """Whether the values tell weights or moments apart: digests, norms, sums; not sizes."""
    if spread.quantity not in ("weight", "optimizer") and not _reduced(spread):
        return False
    if _AMOUNTS.search(_words(spread)):
        return False
    digests = all(number(t) is None for v in spread.values.values() for t in v)
    return digests or _NORMS.search(f"{_words(spread)} {spread.row.about}") is not None


def _reduced(spread: Spread) -> bool:
    """Whether gradients are told to be those after the reduction, which copies share."""
    return spread.quantity == "gradient" and None is not _AFTER.search(
        f"{_words(spread)} {spread.row.about}"
    )


def _words(spread: Spread) -> str:
    return f"{spread.row.text} {spread.label}"


def _held_whole(spread: Spread) -> bool:
    """Whether each rank's value is of a whole copy, not of its shard."""
    words = f"{_words(spread)} {spread.row.about}"
    return not _SHARDED.search(words) or _COPIES.search(words) is not None


def _odd(spread: Spread, members: Sequence[int]) -> tuple[int, ...]:
    """The members unlike a clear majority; () when there is none."""
    seen = Counter(spread.values[r] for r in members)
    most, times = seen.most_common(1)[0]
    if 2 * times <= len(members) or spread.axis:
        return ()
    return tuple(r for r in members if spread.values[r] != most)


def _weights(weights: list[Spread], layout: Layout) -> list[Finding]:
    """The first place where copies differ, over dp before any other axis."""
    for axis in ("dp", "tp", "pp"):
        judged = [(s, g) for s in weights if _held_whole(s) and (g := groups_of(s, layout, axis))]
        judged = [(s, g) for s, g in judged if not _EXPERT.search(s.name)]
        if axis != "dp":
            judged = [(s, g) for s, g in judged if _copied(s, judged)]
        bad = [(s, m) for s, g in judged if (m := apart(s, g))]
        if not bad:
            continue
        good = [s for s, g in judged if not apart(s, g)]
        if axis != "dp":
            known = [s for s in weights if s not in good and not any(s is b for b, _ in bad)]
            good += [s for s in known if not apart(s, groups_of(s, layout, "dp"))]
        return _diverged(bad, good, axis)
    return []


def _copied(spread: Spread, judged: Sequence[tuple[Spread, list[list[int]]]]) -> bool:
    """Whether this name is a copy on a model axis: said so, or equal at an earlier check."""
    if _COPIES.search(_words(spread)):
        return True
    earlier = [(s, g) for s, g in judged if s.name == spread.name and s.label == spread.label]
    return bool(earlier) and bool(earlier[0][0].name) and not apart(*earlier[0])


def _diverged(bad: list[tuple[Spread, list[int]]], good: list[Spread], axis: str) -> list[Finding]:
    first, members = bad[0]
    names_bad = {s.name for s, _ in bad if s.name}
    last_good = [s for s in good if s.name and s.row.line >= first.row.line]
    names_good = {s.name for s in last_good} - names_bad
    items = [first.row.item, bad[-1][0].row.item]
    equal_before = [s for s in good if (s.name, s.label) == (first.name, first.label)]
    before = [s for s in equal_before if s.row.line < first.row.line]
    items = [*[s.row.item for s in before[-1:]], *items]
    if names_bad and len(names_good) >= 2 and len(names_bad) <= len(names_good):
        return [_one_class(first, members, names_bad, names_good, axis, items)]
    if axis != "dp":
        return []
    restarted = first.row.attempt > 0 and all(s.row.attempt < first.row.attempt for s in before)
    close = first.row.since and first.row.line - first.row.since <= _NEAR
    if restarted and (before or close):
        return [_not_restored(first, members, items)]
    at_init = not before and (first.step in (0, None) or _INIT.search(_words(first)) is not None)
    why = "init" if at_init else "unsynchronised-step" if before else "unknown"
    begin = (
        f"Replicas already differ at {first.place}"
        if not before
        else f"Replicas are equal until {before[-1].place} and differ from {first.place} on"
    )
    return [
        root(
            "numeric.replicas-diverged",
            "likely",
            f"{begin}: {first.label or first.name} is {first.shown(members)}; "
            f"{count(len(bad), 'check')} of {len(bad) + len(good)} "
            f"{'disagrees' if len(bad) == 1 else 'disagree'}.",
            [],
            more=items,
            ranks=_odd(first, members),
            where=why,
            excluded=(
                ("numeric.gradient-reduction", "no parameter is told to agree meanwhile"),
                ("numeric.resume-state", "it did not begin at a restart"),
                ("numeric.tp-rng", "the ranks compared are replicas"),
                ("numeric.divergence", "the replicas differ; no common curve leaves its trend"),
            ),
            formula=f"{first.place}: {first.shown(members)} (must be equal over {axis})",
        )
    ]


def _one_class(
    first: Spread,
    members: list[int],
    bad: set[str],
    good: set[str],
    axis: str,
    items: list[Item],
) -> Finding:
    named = ", ".join(sorted(bad)[:4])
    return root(
        "numeric.gradient-reduction",
        "likely",
        f"Only the copies of {named} differ over {axis} (from {first.place} on: "
        f"{first.shown(members)}), while {count(len(good), 'other parameter')} stay equal: their "
        "gradient is not reduced over all ranks that hold a copy.",
        [],
        more=items,
        where="missing",
        excluded=(
            ("numeric.replicas-diverged", "only one class of parameters is concerned"),
            ("numeric.loss-scaling", "other parameters agree"),
            ("numeric.tp-inputs-differ", "other parameters agree, so the inputs did"),
            ("numeric.tp-rng", "the copies were equal before the first update"),
        ),
        formula=f"{first.place}: {first.shown(members)} (must be equal over {axis})",
    )


def _not_restored(first: Spread, members: list[int], items: list[Item]) -> Finding:
    return root(
        "numeric.resume-state",
        "likely",
        f"After the restart {first.label or first.name} differs between ranks "
        f"({first.place}: {first.shown(members)}): not all of them loaded the same state.",
        [],
        more=items,
        ranks=_odd(first, members),
        excluded=(
            ("numeric.replicas-diverged", "it begins at a restart"),
            ("numeric.resume-data", "state, not sample order, differs"),
            ("numeric.divergence", "the change is at the resume"),
        ),
        formula=f"{first.place}: {first.shown(members)}",
    )
