"""Random streams of a tp group: numeric.tp-rng.

In: digests of weights at init, dropout masks, seeds and random states by tp rank. Out: at most one
finding: shards (or what is drawn for them) are equal, or copies and their stream are not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from playbooks.measures.by_rank import apart, groups_of
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from playbooks.finding import Finding
    from playbooks.measures.by_rank import Spread
    from playbooks.measures.layout import Layout

_SHARDED = re.compile(
    r"(?i)\bshard|\bfsdp|zero[- ]?3|\bflat_?param|\blocal\b|\bcolumn|\brow[- ]par"
)
_INIT = re.compile(r"(?i)\binit|construct|before (?:the )?(?:first )?step|after build|at start")
_RANDOM = re.compile(r"(?i)dropout|\brng|\bseeds?\b|philox|generator|random")
_COPIED = re.compile(r"(?i)\breplicat|\bshared\b|\bdefault\b|\bmust agree|\bresidual")
_TOLD = re.compile(r"(?i)\bhead|shard|parallel|replicat|residual|default|shared")
_REGION = re.compile(r"(?i)\bhead|shard|\battention|parallel region|model[- ]parallel")
_SPLIT_NAME = re.compile(
    r"(?i)qkv|[qkvo]_proj|w[qkvo]\b|up\b|gate_up|(?:up|gate|down)_proj|down\b|fc[12]\b|dense_\w+|"
    r"attn\.(?:out|proj)|linear_(?:qkv|proj|fc\d)|c_attn|c_fc|c_proj|vocab"
)


def rule(spreads: list[Spread], layout: Layout) -> list[Finding]:
    """Shards equal at init, masks equal on shards, or copies and their stream not equal."""
    told = (layout.size("tp") or 1) > 1 or layout.model_parallel
    if not told and not any(s.axis == "tp" for s in spreads):
        return []
    inputs = [s for s in spreads if s.quantity == "data"]
    if any(apart(s, groups_of(s, layout, "tp")) for s in inputs):
        return []
    same: list[tuple[Spread, list[int]]] = []
    differ: list[tuple[Spread, list[int]]] = []
    rightly = 0
    for spread in spreads:
        groups = groups_of(spread, layout, "tp")
        split = _is_split(spread)
        if not groups or split is None:
            continue
        differing = apart(spread, groups)
        if split and not differing:
            same.append((spread, groups[0]))
        elif not split and differing and (spread.step in (0, None) or spread.quantity == "random"):
            differ.append((spread, differing))
        else:
            rightly += 1
    kinds: dict[str, list[tuple[Spread, list[int]]]] = defaultdict(list)
    for pair in same:
        kinds[pair[0].quantity].append(pair)
    weights = kinds.get("weight", [])
    if weights and len({s.values[g[0]] for s, g in weights}) * 2 > len(weights):
        return [_stream("same-seed-on-shards", weights, "shards", "are equal", rightly)]
    masks = kinds.get("random", [])
    if masks:
        return [_stream("dropout-stream", masks, "masks of shards", "are equal", rightly)]
    if differ:
        why = "drift" if differ[0][0].quantity == "random" else "dropout-stream"
        return [_stream(why, differ, "copies", "differ", rightly)]
    return []


def _is_split(spread: Spread) -> bool | None:
    """True for what tp ranks hold different parts of, False for copies, None when not told."""
    words = f"{spread.row.text} {spread.label}"
    if spread.quantity == "random":
        words = words if _TOLD.search(words) else f"{words} {spread.row.about}"
        if not _RANDOM.search(f"{words} {spread.row.about}"):
            return None  # an attention mask is no random stream
    copies = (
        re.search(r"(?i)\breplicat|\bshared\b|\bdefault\b|\bmust agree|\bresidual", words)
        is not None
    )
    if spread.quantity == "random":
        if copies:
            return False
        return True if _REGION.search(words) else None
    if spread.quantity != "weight":
        return None
    early = spread.step in (0, None) and (_INIT.search(f"{words} {spread.row.about}") is not None)
    if copies:
        return False if early and spread.name else None
    if _SHARDED.search(words):
        return True if early or spread.step in (0, None) else None
    return True if early and _SPLIT_NAME.search(spread.name) else None


def _stream(
    why: str, found: list[tuple[Spread, list[int]]], what: str, how: str, rightly: int
) -> Finding:
    first, members = found[0]
    return root(
        "numeric.tp-rng",
        "likely",
        f"{what.capitalize()} {how} over the tp ranks in {count(len(found), 'check')} "
        f"({rightly} as they should be), such as {first.name or first.label}: "
        f"{first.shown(members)}.",
        [],
        more=[s.row.item for s, _ in found[:2]],
        where=why,
        excluded=(
            ("numeric.tp-inputs-differ", "no input that was printed differs inside the group"),
            ("numeric.replicas-diverged", "the ranks compared are of one tp group"),
            ("numeric.gradient-reduction", "it is there before any gradient"),
        ),
        formula=f"{first.name or first.label}: {first.shown(members)}",
    )
