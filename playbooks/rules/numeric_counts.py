"""Counts that show which share of the data ranks read: numeric.shards-overlap by arithmetic.

In: counts of distinct samples, of steps in an epoch, of the data set. Out: at most one finding,
with the sum that does not come out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.measures.values import number
from playbooks.rules.naming import root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.finding import Finding, Item
    from playbooks.measures.values import Row, Value
    from playbooks.measures.view import Measures
    from playbooks.policy import Policy

_UNION = re.compile(r"(?i)\bunion|\bunique|\bdistinct")
_COMMON = re.compile(
    r"(?i)\bintersect\w*|\bby both|\boverlap\w*|\bin common|\bshared by|"
    r"\brank ?\d+\W{1,3}(?:and |with )?rank ?\d+|\bduplicate"
)
_SAMPLES = re.compile(r"(?i)\bids?\b|\bsamples?\b|\bindices|sample_ids")
_OF = re.compile(r"\b(\d[\d,]*) ?(?:of|/|out of) ?(\d[\d,]*)\b")
_BOTH = re.compile(r"(?i)\bboth\D{0,12}?(\d[\d,]*)")
_PERCENT = re.compile(r"\b(\d{1,3}(?:\.\d+)?) ?%")
_SIZE = re.compile(
    r"(?i)\b(?:data ?set|train(?:ing)? (?:set|data|samples|examples)|num_?examples|examples)\b"
)
_NOT_SIZE = re.compile(r"(?i)\bper\b|step|epoch|shard|token")
_EPOCH = re.compile(
    r"(?i)(?:steps|batches|iterations|iters|updates)[ _](?:per|in|an|each|of)[ _](?:one |an |the )?"
    r"epoch|len\((?:train_?)?(?:data)?loader\)|epoch (?:length|steps|size)|"
    r"(?:data)?loader (?:length|batches)"
)


def rule(measures: Measures, policy: Policy) -> list[Finding]:
    """Distinct samples first, then what ranks share, then the length of an epoch."""
    return (
        _union(measures.rows, policy) or _shared(measures.rows, policy) or _length(measures, policy)
    )


def _union(rows: Sequence[Row], policy: Policy) -> list[Finding]:
    """A count of distinct samples over ranks below what they drew together."""
    for i, row in enumerate(rows):
        for value in row.values:
            distinct = value.number
            if not _UNION.search(value.label) or value.label.endswith(" of") or distinct is None:
                continue
            near = [v for r in rows[max(0, i - 4) : i + 4] for v in r.values]
            near = [v for v in near if v.row.source == row.source]
            drawn = _drawn(near, distinct)
            if drawn is None or distinct >= (1 - policy.shared_samples) * drawn[0]:
                continue
            return [
                overlap(
                    f"The ranks read {distinct:.0f} distinct samples where {drawn[0]:.0f} were "
                    "due in the epoch.",
                    "seed-per-rank",
                    [row.item, drawn[1].row.item],
                    f"{distinct:.0f} / {drawn[0]:.0f} = {distinct / drawn[0]:.2f} (must be 1)",
                )
            ]
    return []


def _drawn(near: Sequence[Value], distinct: float) -> tuple[float, Value] | None:
    """What the ranks read together: their counts summed, else the "of" of the same label."""
    for value in near:
        counts = [n for t in value.texts if (n := number(t)) is not None]
        if len(counts) > 1 and re.search(r"(?i)rank|replica|gpu", value.label):
            return sum(counts), value
    for value in near:
        total = value.number
        if _UNION.search(value.label) and value.label.endswith(" of") and total is not None:
            return total, value
    for value in near:
        total = value.number
        if (
            re.search(
                r"(?i)\b(?:total|drawn|read|dataset|seen|yielded|delivered|produced)\b", value.label
            )
            and total
        ):
            if total < distinct or _UNION.search(value.label):
                continue
            return total, value
    return None


def _shared(rows: Sequence[Row], policy: Policy) -> list[Finding]:
    """Samples that two ranks have in common, as a share of what they read."""
    for row in rows:
        words = f"{row.text} {row.lead} {row.about}"
        if not _COMMON.search(row.text) or not _SAMPLES.search(words):
            continue
        both = _BOTH.search(row.text)
        if both:
            counts = [int(n) for n in re.findall(r"\b\d+\b", row.text)]
            found = re.match(r"(\S+) (\S+)", f"{both[1]} {max(counts)}")
        else:
            found = _OF.search(row.text)
        percent = _PERCENT.search(row.text)
        if found and float(found[2].replace(",", "")):
            part, whole = (float(found[i].replace(",", "")) for i in (1, 2))
            share, told = part / whole, f"{part:.0f} of {whole:.0f}"
        elif percent:
            share, told = float(percent[1]) / 100, f"{percent[1]} %"
        else:
            continue
        if policy.shared_samples < share <= 1:
            return [
                overlap(
                    f"Two ranks have {told} of their samples in common.",
                    "seed-per-rank",
                    [row.item],
                    f"share {share:.3f} (must be 0)",
                )
            ]
    return []


def _length(measures: Measures, policy: Policy) -> list[Finding]:
    """Every rank steps through the whole data set: steps * batch is its size on each of them."""
    values = [v for r in measures.rows for v in r.values if len(v.texts) == 1]
    size = next(
        (v for v in values if _SIZE.search(v.label) and not _NOT_SIZE.search(v.label)), None
    )
    steps = next((v for v in values if _EPOCH.search(v.label)), None)
    if size is None or steps is None or not size.number or not steps.number:
        return []
    sizes = measures.layout.sizes
    batches = {
        int(b) for r in measures.rows for k, b in r.settings.items() if k == "micro_batch" and b > 0
    }
    ranks = measures.layout.size("dp") or measures.layout.world
    if len(batches) != 1 or not ranks or ranks < 2 or max(sizes.get("accumulation", {1})) > 1:
        return []
    batch = batches.pop()
    read = steps.number * batch
    if abs(read - size.number) > max(batch, policy.shared_samples * size.number):
        return []
    return [
        overlap(
            f"An epoch takes {steps.number:.0f} steps of {batch} samples on each of {ranks} ranks: "
            f"every rank reads all {size.number:.0f} samples instead of its share.",
            "no-sampler",
            [steps.row.item, size.row.item],
            f"{steps.number:.0f} * {batch} = {read:.0f} of {size.number:.0f} a rank (due "
            f"{size.number / ranks:.0f})",
        )
    ]


def overlap(summary: str, why: str, items: Sequence[Item], formula: str) -> Finding:
    """The finding, with what tells it from its look-alikes."""
    return root(
        "numeric.shards-overlap",
        "likely",
        summary,
        [],
        more=items,
        where=why,
        excluded=(
            ("numeric.sampler-not-reseeded", "the repetition is between ranks in one epoch"),
            ("numeric.tp-inputs-differ", "the ranks compared are replicas, which should differ"),
            ("numeric.resume-data", "no restart is involved"),
        ),
        formula=formula,
    )
