"""Layouts that pay for memory they do not need: slow.over-sharded.

In: what a memory feature takes of the step (gathers of ZeRO-3, recomputation, cp or tp
collectives), peak memory against the device, parameters. Out: at most one root, with the
arithmetic of the less sharded layout.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from playbooks.breakdown import COMM
from playbooks.rules.naming import root
from playbooks.rules.slow_shares import median_share, parts_of, quotes
from playbooks.words import size

if TYPE_CHECKING:
    from playbooks.breakdown import Part
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

STATES, MASTER = 4.0, 12.0
"""Bytes a parameter: weights and gradients in half precision; master weights and Adam's moments
(Rajbhandari et al. 2020, arXiv:1910.02054)."""


def _memory(evidence: Evidence) -> tuple[float | None, float | None, list[Event]]:
    """(peak bytes of a rank, bytes of its device, lines that tell the peak)."""
    peaks = [(v, e) for e in evidence.lines.of("train.step") if (v := e.number("peak"))]
    if not peaks:
        peaks = [
            (v, e)
            for e in evidence.lines.of("train.step")
            if (v := e.number("memory") or e.number("reserved") or e.number("allocated"))
        ]
    capacity = evidence.settings.number("capacity")
    if not peaks:
        return None, capacity, []
    most = max(peaks, key=lambda p: p[0])
    return most[0], capacity, [most[1]]


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """A feature that is paid for and not needed."""
    told = evidence.settings
    parts = parts_of(evidence)
    peak, capacity, lines = _memory(evidence)
    if not peak or not capacity or evidence.settings.overlap_off:
        return []
    feature = _feature(evidence, policy, parts)
    if feature is None:
        return []
    why, what, share, setting, quantities = feature
    need: float = peak
    formula = f"peak {size(peak)} of {size(capacity)}"
    if why == "zero3" and told.parameters:
        world = max(evidence.world_size or 0, int(told.number("dp") or 0), _ranks_told(evidence), 1)
        states = told.parameters * (STATES + MASTER / world)
        need = max(peak - told.parameters * (STATES + MASTER) / world, 0.0) + states
        formula += (
            f"; at stage 1 {told.parameters:.3g} * ({STATES:g} + {MASTER:g}/{world}) = "
            f"{size(states)} "
            f"of states, about {size(need)} in all"
        )
    if need > policy.shard_room * capacity:
        return []
    return [
        root(
            "slow.over-sharded",
            "likely",
            f"{what} takes {share:.0%} of the step, while the peak is {size(peak)} of "
            f"{size(capacity)}: memory does not need it.",
            [*setting[:1], *lines, *quotes(evidence, *quantities)],
            where=why,
            excluded=(
                ("slow.comm-exposed", "the bytes themselves are avoidable"),
                ("slow.offload-bound", "nothing is offloaded"),
                ("link.internode-too-slow", "less sharding moves fewer bytes"),
            ),
            formula=formula,
        )
    ]


def _ranks_told(evidence: Evidence) -> int:
    return max((int(r) + 1 for r in evidence.breakdown.of("rank") if isinstance(r, int)), default=0)


def _feature(
    evidence: Evidence, policy: Policy, parts: list[Part]
) -> tuple[str, str, float, list[Event], tuple[str, ...]] | None:
    """(why, what, share, lines that set it, quantities): what is paid for memory."""
    told = evidence.settings
    gathers = median_share(parts, "allgather") or 0.0
    if told.number("zero") == 3 and not told.events("offload"):
        share = gathers + (median_share(parts, "reducescatter") or 0.0)
        share = share or median_share(parts, "comm") or 0.0
        if share >= policy.shard_share:
            return (
                "zero3",
                "Gathering sharded parameters (ZeRO-3)",
                share,
                told.events("zero"),
                ("allgather", "comm"),
            )
    again = median_share(parts, "recompute") or 0.0
    if again >= policy.shard_share:
        return (
            "full-recompute",
            "Recomputing activations",
            again,
            told.events("recompute"),
            ("recompute",),
        )
    for name, setting, length in (("cp", "cp", policy.short_sequence), ("tp", "tp", None)):
        told_share = _named(parts, name)
        long = told.number("sequence")
        if told_share is None or told_share < policy.shard_share or (told.number(setting) or 0) < 2:
            continue
        if length is not None and (long is None or long > length):
            continue
        why = "cp-short-sequence" if name == "cp" else "tp-too-large"
        what = f"Communication of {name} = {told.number(setting):g}"
        return why, what, told_share, told.events(setting), COMM
    return None


def _named(parts: list[Part], axis: str) -> float | None:
    """Share of communication whose name says the axis."""
    found = []
    for part in parts:
        total = 0.0
        for quantity in COMM:
            if axis in part.names.get(quantity, "").split():
                total += part.share(quantity) or 0.0
        if total:
            found.append(total)
    return median(found) if found else None
