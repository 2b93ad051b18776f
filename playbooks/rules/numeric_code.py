"""How a program's source sets its sampler up: likely causes, since code alone shows no effect.

In: lines of source that were given, or that logs quote. Out: at most one finding:
numeric.shards-overlap (seed by rank), tp-inputs-differ (sampler by world rank under tp),
sampler-not-reseeded (no set_epoch). Frameworks that call set_epoch themselves end the question.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.rules.naming import broke, root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding, Item
    from playbooks.measures.values import Row
    from playbooks.policy import Policy

_CALL = re.compile(r"\bDistributedSampler\s*\(")
_CLOSES = 6
"""Lines over which one call may run."""
_OWN = re.compile(r"(?i)lightning|accelerat|\bTrainer\(|composer|fairseq|\bignite\b|hf_trainer")
_EPOCHS = re.compile(r"\bfor\s+\w*(?:epoch|ep|e)\w*\s+in\s+\w*range|\bwhile\b.*epoch")
_SEED = re.compile(r"\bseed\s*=\s*[^,)]*\brank|\bseed\s*=\s*[^,)]*get_rank|\bseed\s*=\s*[^,)]*RANK")
_WORLD = re.compile(r"num_replicas\s*=\s*[\w.\[\]\"']*(?:world_size|get_world_size|WORLD_SIZE)")
_GLOBAL = re.compile(
    r"\brank\s*=\s*(?:[\w.]*get_rank\(\)|global_rank|world_rank|rank\b|.*\"RANK\")"
)
_UNSHUFFLED = re.compile(r"shuffle\s*=\s*False")
_CLASS = re.compile(r"\bclass\s+\w+|\bimport\b")


def rule(evidence: Evidence, _: Policy) -> list[Finding]:
    """The seed first, then whose rank, then the epoch."""
    rows = evidence.measures.rows
    calls = _calls(rows)
    if not calls or broke(evidence):
        return []
    for call, row in calls:
        if _SEED.search(call):
            return [_found("numeric.shards-overlap", _SAYS_SEED, row.item, "seed-per-rank")]
    tp = evidence.measures.layout.size("tp")
    for call, row in calls:
        plain = call.rstrip().endswith(("DistributedSampler(ds)", "(dataset)"))
        if tp and tp > 1 and ((_WORLD.search(call) and _GLOBAL.search(call)) or plain):
            return [_found("numeric.tp-inputs-differ", _SAYS_RANK, row.item, None)]
    code = [r for r in rows if r.kind == "code"]
    called = any("set_epoch" in r.text for r in rows)
    own = any(_OWN.search(r.text) for r in code)
    loops = any(_EPOCHS.search(r.text) for r in code)
    shuffled = [(c, r) for c, r in calls if r.kind == "code" and not _UNSHUFFLED.search(c)]
    if called or own or not loops or not shuffled or _sampled_once(code):
        return []
    return [_found("numeric.sampler-not-reseeded", _SAYS_EPOCH, shuffled[0][1].item, None)]


_SAYS_SEED = (
    "The sampler's seed depends on the rank, so every rank shuffles in an order of its own."
)
_SAYS_RANK = (
    "The sampler counts replicas and rank over the whole world though tp is larger than 1, so the "
    "ranks of one tp group read different samples."
)
_SAYS_EPOCH = (
    "The source loops over epochs with a shuffling DistributedSampler and never calls set_epoch, "
    "so every epoch has the same order."
)


def _sampled_once(code: Sequence[Row]) -> bool:
    """Whether the sampler is made anew inside an epoch loop, with a seed of the epoch."""
    return any(re.search(r"seed\s*=\s*[^,)]*epoch", r.text) for r in code)


def _calls(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Every call of the sampler, with its arguments on one line."""
    out = []
    for place, row in enumerate(rows):
        if not _CALL.search(row.text) or _CLASS.search(row.text):
            continue
        call = row.text[row.text.index("DistributedSampler") :]
        for later in rows[place + 1 : place + _CLOSES]:
            if call.count("(") <= call.count(")") or later.source != row.source:
                break
            call += " " + later.text
        out.append((call, row))
    return out


def _found(cause: str, says: str, item: Item, why: str | None) -> Finding:
    return root(
        cause,
        "likely",
        says,
        [],
        more=[item],
        where=why,
        excluded=(
            ("numeric.divergence", "the source shows what the curve only hints at"),
            ("numeric.resume-data", "it holds without a restart"),
        ),
    )
