"""Which samples ranks read: numeric.tp-inputs-differ, shards-overlap, sampler-not-reseeded.

In: sample ids and batch digests by rank, step and epoch; counts of distinct samples. Out: at most
one finding. Ranks of one model-parallel group must read the same, replicas must not, and an epoch
must not repeat the one before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from playbooks.measures.quantities import mentioned
from playbooks.measures.values import number
from playbooks.rules import numeric_counts
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding, Item
    from playbooks.measures.by_rank import Spread
    from playbooks.measures.layout import Layout
    from playbooks.measures.values import Row
    from playbooks.policy import Policy

_COUNTED = re.compile(
    r"(?i)consumed|seen|count|number|num_|total|drawn|valid|size|length|\blen\b|per rank\b|batches|"
    r"tokens per|position|offset|skip|expected|dataset"
)
_IDS = re.compile(r"(?i)\bids?\b|_ids?\b|indices|indexes|\bidx|samples?\b|order|perm")
_NAMES = re.compile(
    r"(?i)\bids?\b|_ids?\b|hash|sha\d*|digest|crc|checksum|md5|indices|fingerprint|first (?:tokens|"
    r"samples|keys)|\btokens\b|sum of|\bids_"
)
"""What names samples; a count or a rate that is equal on all ranks names none."""
_WHOLE = re.compile(
    r"(?i)\breplicat|must be equal|must agree|embedding out|norm(?:ed)? out|same on all"
)
"""What is said of activations that tp ranks hold whole."""
_NO_SHUFFLE = re.compile(r"(?i)shuffle\W{0,3}(?:false|off|no\b)|sequential ?sampler|without shuffl")


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Inside a model-parallel group first, then between replicas, then between epochs."""
    measures = evidence.measures
    if not measures.rows:
        return []
    layout = measures.layout
    samples = [s for s in measures.spreads if _tells_samples(s)]
    read = [s for s in samples if s.quantity == "data"]
    return (
        _inside(samples, layout)
        or _between(read, layout, policy)
        or numeric_counts.rule(measures, policy)
        or _epochs(measures.rows)
    )


def _tells_samples(spread: Spread) -> bool:
    if spread.quantity == "activation":
        return _WHOLE.search(f"{spread.row.text} {spread.row.about}") is not None
    if spread.quantity != "data":
        return False
    return not _COUNTED.search(spread.label) or any(_digest(v) for v in spread.values.values())


def _digest(texts: Sequence[str]) -> bool:
    return all(number(t) is None and len(t) >= 6 for t in texts if t != "-")


def _inside(samples: Sequence[Spread], layout: Layout) -> list[Finding]:
    """Ranks of one tp group that do not read the same."""
    bad: list[tuple[Spread, list[int]]] = []
    good = 0
    for spread in samples:
        groups = (
            [sorted(spread.values)]
            if spread.axis == "tp"
            else (layout.groups(spread.values, "tp") or [])
            if not spread.axis
            else []
        )
        apart = next((g for g in groups if not spread.equal(g)), None)
        if apart is not None:
            bad.append((spread, apart))
        elif groups:
            good += 1
    if not bad or len(bad) < good:
        return []
    first, members = bad[0]
    return [
        root(
            "numeric.tp-inputs-differ",
            "likely",
            f"Ranks of one tp group read different inputs: {first.label} at {first.place} is "
            f"{first.shown(members)}; so in {len(bad)} of {count(len(bad) + good, 'check')}.",
            [],
            more=[first.items[r] for r in members[:3]],
            excluded=(
                ("numeric.tp-rng", "the inputs already differ"),
                ("numeric.shards-overlap", "the difference lies inside a model-parallel group"),
                ("numeric.replicas-diverged", "the inputs, not the weights, are what differs"),
                ("numeric.gradient-reduction", "forward already starts from other inputs"),
                ("numeric.divergence", "the inputs are wrong from the first step"),
            ),
            formula=f"{first.place}: {first.shown(members)} (must be equal over tp)",
        )
    ]


def _between(samples: Sequence[Spread], layout: Layout, policy: Policy) -> list[Finding]:
    """Replicas whose batches are equal, or whose ids intersect."""
    equal: list[tuple[Spread, list[int]]] = []
    apart = 0
    ids: dict[tuple[int | None, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    rows: dict[tuple[int | None, int], list[Item]] = defaultdict(list)
    for spread in samples:
        groups = (
            [sorted(spread.values)]
            if spread.axis == "dp"
            else (layout.groups(spread.values, "dp") or [])
            if not spread.axis
            else []
        )
        for group in groups:
            pair = _equal_pair(spread, group)
            if pair:
                equal.append((spread, pair))
            else:
                apart += 1
            if _IDS.search(spread.label):
                for rank in group:
                    key = (spread.epoch, spread.row.attempt)
                    ids[key][rank].update(t for t in spread.values[rank] if t != "-")
                    rows[key].append(spread.items[rank])
    if equal and len(equal) > apart:
        spread, pair = equal[0]
        return [
            numeric_counts.overlap(
                f"Replicas read the same batches: {spread.label} at {spread.place} is "
                f"{spread.shown(pair)}; so in {len(equal)} of "
                f"{count(len(equal) + apart, 'check')}.",
                "no-sampler",
                [spread.items[r] for r in pair[:2]],
                f"{spread.place}: {spread.shown(pair)} (must differ over dp)",
            )
        ]
    for key, by_rank in ids.items():
        found = _intersect(by_rank, policy)
        if found is not None:
            shared, union, drawn = found
            return [
                numeric_counts.overlap(
                    f"{shared} of {union} distinct sample ids were read by more than one of "
                    f"{len(by_rank)} replicas in one epoch.",
                    "seed-per-rank",
                    rows[key][:2],
                    f"{drawn} read - {union} distinct = {drawn - union} repeated",
                )
            ]
    return []


def _equal_pair(spread: Spread, group: Sequence[int]) -> list[int]:
    """Two members that read the same; [] when all differ. One number alone tells nothing."""
    words = f"{spread.label} {spread.row.about}"
    if not _NAMES.search(words) and not all(_digest(spread.values[r]) for r in group):
        return []
    seen: dict[tuple[str, ...], int] = {}
    for rank in group:
        values = spread.values[rank]
        if len(values) == 1 and number(values[0]) is not None and len(values[0]) < 4:
            return []
        if values in seen:
            return [seen[values], rank]
        seen[values] = rank
    return []


def _intersect(by_rank: dict[int, set[str]], policy: Policy) -> tuple[int, int, int] | None:
    """(ids of two ranks and more, distinct ids, ids read) when more than padding is shared."""
    if len(by_rank) < 2:
        return None
    seen: dict[str, int] = defaultdict(int)
    for ids in by_rank.values():
        for one in ids:
            seen[one] += 1
    shared = sum(1 for times in seen.values() if times > 1)
    drawn = sum(seen.values())
    few = max(2 * len(by_rank), policy.shared_samples * len(seen))
    return (shared, len(seen), drawn) if shared > few else None


# --- epochs ------------------------------------------------------------------------------------

_Sequence = dict[int, tuple[tuple[str, ...], "Row"]]


def _epochs(rows: Sequence[Row]) -> list[Finding]:
    """Orders of consecutive epochs that are identical on each rank."""
    if any(_NO_SHUFFLE.search(row.text) for row in rows):
        return []
    orders = _orders(rows)
    compared = repeated = 0
    items: list[Item] = []
    shown = ""
    pairs: set[tuple[int, int]] = set()
    for (label, rank, attempt, epoch), one in orders.items():
        other = orders.get((label, rank, attempt, epoch + 1), {})
        for place in one.keys() & other.keys():
            compared += len(one[place][0])
            if one[place][0] == other[place][0]:
                repeated += len(one[place][0])
                pairs.add((epoch, epoch + 1))
                items = items or [one[place][1].item, other[place][1].item]
                shown = shown or " ".join(one[place][0][:4])
    if compared < 2 or repeated < 0.95 * compared:
        return []
    epochs = sorted({e for pair in pairs for e in pair})
    return [
        root(
            "numeric.sampler-not-reseeded",
            "likely",
            f"Epochs {epochs[0]} to {epochs[-1]} read the same samples in the same order: all "
            f"{repeated} values that can be compared are equal, such as {shown}.",
            [],
            more=items,
            excluded=(
                ("numeric.shards-overlap", "the repetition is between epochs, not ranks"),
                ("numeric.resume-data", "no restart lies between them"),
                ("numeric.divergence", "the loss repeats its pattern with the order"),
            ),
            formula=f"{repeated} of {compared} values equal those of the epoch before",
        )
    ]


def _orders(rows: Sequence[Row]) -> dict[tuple[str, int | None, int, int], _Sequence]:
    """{(label, rank, attempt, epoch): {place in the epoch: values}} of what names samples."""
    out: dict[tuple[str, int | None, int, int], _Sequence] = defaultdict(dict)
    for row in rows:
        epoch = row.at("epoch")
        if epoch is None:
            continue
        for value in row.values:
            quantity = value.quantity or mentioned(value.label) or mentioned(row.about)
            counted = _COUNTED.search(value.label) and not _digest(value.texts)
            if quantity != "data" or counted:
                continue
            sequence = out[value.label, value.rank, row.attempt, epoch]
            plain = len(value.texts) == 1 and number(value.texts[0]) is not None
            if plain and not _IDS.search(value.label):
                continue
            place = row.at("batch")
            place = len(sequence) if place is None else place
            sequence.setdefault(place, (value.texts, row))
    return out
