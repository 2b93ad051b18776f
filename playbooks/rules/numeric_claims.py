"""Results of checks that a program printed as a sentence: equal or not, of what, between whom.

In: lines such as "weights differ between replicas, max abs diff 3e-4". Out: at most one numeric
finding. A sentence counts when it states (no "must", "if", "expected to"), and the last statement
about the same thing outweighs earlier ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.measures.layout import Layout
    from playbooks.measures.values import Row
    from playbooks.policy import Policy

_CLAUSE = re.compile(r"[;|]|\.\s|, (?=and |but |while )| but | while |\((?!.*\brank)")
_NO_STATEMENT = re.compile(
    r"(?i)\b(?:must|should|expect\w* to|if|would|whether|may|can|could|want\w*|please|ensure|make "
    r"sure|to check|verify that|warning: this)\b"
)
_NONE = re.compile(
    r"(?i)\b(?:do(?:es)? not|did not|no|never|without|zero|0) (?:\w+ ){0,2}?"
    r"(?:differ\w*|mismatch\w*|disagree\w*|diverg\w*)|"
    r"(?:differ\w*|mismatch\w*)\W{1,3}(?:none|no|0|false)\b"
)
_DIFFER = re.compile(
    r"(?i)\bdiffer(?:s|ent|ing|ed)?\b|\bmismatch\w*|\bdisagree\w*|\bunequal\b|\bdiverged?\b|"
    r"\bout of sync|!=|\bnot (?:\w+ ){0,2}?(?:equal|identical|the same|match\w*|agree|in sync)|"
    r"\bno longer (?:equal|identical|the same|match\w*)|"
    r"\b(?:equal|identical|same|match\w*|agree)\W{1,4}(?:false|no\b|fail\w*)"
)
_EQUAL = re.compile(r"(?i)\bequal\b|\bidentical\b|\bthe same\b|\bin sync\b|\bagree|\bmatch")
_AMOUNT = re.compile(
    r"(?i)\b(?:sizes?|number|count|length|lengths|times?|seconds|rate|clocks?|speed|throughput|"
    r"shapes?|amount|tokens|many|steps?/s|ms|GB|GiB|MB)\b"
)
"""Words of clauses about how much there is, not about what it is."""
_SUBJECTS = (
    ("mask", r"dropout|\bmasks?\b|\brng\b|random (?:state|stream)"),
    ("shard", r"\bshards?\b|\bsharded\b|column|row[- ]parallel"),
    ("gradient", r"\bgrad\w*"),
    ("order", r"\border\b|permutation|indices of epoch|sequence of (?:batches|samples)"),
    (
        "input",
        (
            r"\binputs\b|\b(?:batch|sample|token|input)[ _](?:ids?|hash\w*|digests?|contents?)\b|"
            r"\bsame (?:batches|samples)\b|\bsamples read"
        ),
    ),
    ("weight", r"\bweights?\b|\bparam\w*|\bmodel (?:hash|state|checksum)|\breplicas? hash"),
)
_AXES = (
    ("epoch", r"\bepochs?\b"),
    ("tp", r"\btp\b|tensor[- ]parallel|\btp\d"),
    ("dp", r"\bdp\b|\breplicas?\b|data[- ]parallel"),
    ("rank", r"\b(?:ranks?|gpus?|processes)\b"),
)


@dataclass(frozen=True)
class _Claim:
    subject: str
    axis: str
    equal: bool
    row: Row


def rule(evidence: Evidence, _: Policy) -> list[Finding]:
    """What the last claims about each thing amount to."""
    layout = evidence.measures.layout
    claims = [c for row in evidence.measures.rows for c in _claims(row, layout)]
    last = {(c.subject, c.axis): c for c in claims}
    for (subject, axis), claim in last.items():
        cause = _CAUSES.get((subject, axis, claim.equal))
        if cause is None or (subject == "weight" and ("shard", axis) in last):
            continue
        others = [c for c in claims if (c.subject, c.axis, c.equal) == (subject, axis, claim.equal)]
        opposite = [c for c in claims if (c.subject, c.axis) == (subject, axis)]
        if len(others) < len(opposite) / 2:
            continue
        return [_finding(cause, claim, others)]
    return []


_CAUSES = {
    ("weight", "dp", False): "numeric.replicas-diverged",
    ("input", "tp", False): "numeric.tp-inputs-differ",
    ("input", "dp", True): "numeric.shards-overlap",
    ("order", "epoch", True): "numeric.sampler-not-reseeded",
    ("input", "epoch", True): "numeric.sampler-not-reseeded",
    ("shard", "tp", True): "numeric.tp-rng",
    ("mask", "tp", True): "numeric.tp-rng",
}


def _claims(row: Row, layout: Layout) -> list[_Claim]:
    if row.kind == "code" or len(row.text) > 400:
        return []
    out = []
    context = row.text
    for clause in _CLAUSE.split(row.text):
        if not clause or _NO_STATEMENT.search(clause) or _AMOUNT.search(clause):
            continue
        none = _NONE.search(clause)
        differ = _DIFFER.search(clause)
        if not (none or differ or _EQUAL.search(clause)):
            continue
        subject = next((s for s, p in _SUBJECTS if re.search(rf"(?i){p}", clause)), "")
        axis = next((a for a, p in _AXES if re.search(rf"(?i){p}", clause)), "")
        axis = axis or next((a for a, p in _AXES if re.search(rf"(?i){p}", context)), "")
        if axis == "rank":
            axis = "" if layout.model_parallel else "dp"
        if subject and axis:
            out.append(_Claim(subject, axis, bool(none) or not differ, row))
    return out


def _finding(cause: str, claim: _Claim, others: list[_Claim]) -> Finding:
    told = "equal" if claim.equal else "not equal"
    what = {"mask": "random streams", "shard": "shards", "input": "inputs"}.get(
        claim.subject, f"{claim.subject}s"
    )
    where = "between epochs" if claim.axis == "epoch" else f"over {claim.axis}"
    return root(
        cause,
        "likely",
        f"{count(len(others), 'printed check')} {'says' if len(others) == 1 else 'say'} that "
        f"{what} are {told} {where}, which they must {'not ' if claim.equal else ''}be.",
        [],
        more=[others[0].row.item, claim.row.item][: len(others)],
        excluded=(("numeric.divergence", "a check, not the curve, tells it"),),
    )
