"""One rank sets the pace for all: slow.straggler-compute, slow.straggler-input.

In: busy time of each rank in each step (step minus waits), phases, who came last. Out: one root
finding and its effect on the others. Busy time also tells where DDP hides the wait inside
backward, and where peers wait in tp collectives or in the receives of a pipeline.

    busy     #### forward #### backward ####|          rank 2: nothing to wait for
             ## fwd ##|.. waits ..|## bwd ##|..        others

Ranks of one pipeline stage are compared with each other, since stages may differ by design.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from playbooks.finding import Confidence, Finding, Item
from playbooks.timeline import COMPUTE, INPUT
from playbooks.words import ranks_words, seconds

if TYPE_CHECKING:
    import numpy.typing as npt

    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

    Floats = npt.NDArray[np.float64]

PAUSES = ("checkpoint", "evaluation")


@dataclass(frozen=True)
class Slow:
    """A rank that was busy longer than its peers from `onset` on."""

    row: int
    rank: int
    peers: tuple[int, ...]
    """Rows of the ranks it is compared with."""
    alone: bool
    """Whether no rank shares its pipeline stage."""
    onset: int
    """Index into the steady steps."""
    excess: float
    """Median excess over the peers' median, share of the step."""
    consistency: float
    changed: bool
    """Whether it was not slow before the onset."""


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Name the ranks whose busy time exceeds that of their peers, lastingly."""
    line = evidence.timeline
    steady = line.steady(policy.warmup_steps)
    if len(line.ranks) < 2 or steady.size < policy.straggler_steps or not len(evidence.ledger):
        return []
    busy = line.busy[:, steady]
    step = np.median(line.seconds[:, steady], axis=0)
    if not (step > 0).all():
        return []
    found = [s for row in range(len(line.ranks)) if (s := _slow(evidence, policy, row, busy, step))]
    if not found:
        return []
    # Others can only wait for the slowest; a second one is as slow, or it is noise.
    top = max(s.excess for s in found)
    slow = [s for s in found if s.excess >= policy.straggler_tie * top]
    if not _leads(policy, slow, busy):
        return []
    return _findings(evidence, policy, slow, steady, busy, step)


def _peers(evidence: Evidence, row: int) -> tuple[tuple[int, ...], bool]:
    """Rows to compare with: those of the same stage, else all others."""
    ranks = evidence.timeline.ranks
    others = [i for i in range(len(ranks)) if i != row]
    stage = evidence.stages.get(ranks[row])
    same = [i for i in others if evidence.stages.get(ranks[i]) == stage]
    return (tuple(same), False) if same else (tuple(others), True)


def _leads(policy: Policy, slow: list[Slow], busy: Floats) -> bool:
    """Whether the slowest is far ahead of every peer that is not accused with it."""
    one = max(slow, key=lambda s: s.excess)
    accused = {s.row for s in slow}
    median = np.median(busy[:, one.onset :], axis=1)
    rest = [median[i] for i in one.peers if i not in accused]
    if not rest:
        return True
    own, typical = float(median[one.row]), float(np.median([median[i] for i in one.peers]))
    return own - float(max(rest)) >= policy.straggler_lead * (own - typical)


def _needed(policy: Policy, own: Floats, typical: Floats) -> float:
    """Share of the step from which an excess counts. Where all ranks queue for cores the step is
    long for everybody; a rank that works a multiple of what its peers do is slow all the same."""
    late = own.size // 2
    ratio = float(np.median(own[late:]) / max(np.median(typical[late:]), 1e-9))
    multiple = ratio >= policy.straggler_ratio
    return policy.straggler_least if multiple else policy.straggler_share


def _suffix(excess: Floats, level: float) -> int:
    """Begin of the suffix with the largest sum above `level`: where a lasting rise set in."""
    return int(np.argmax(np.cumsum((np.clip(excess, -1, 1) - level)[::-1])[::-1]))


def _slow(evidence: Evidence, policy: Policy, row: int, busy: Floats, step: Floats) -> Slow | None:
    peers, alone = _peers(evidence, row)
    typical = np.median(busy[list(peers)], axis=0)
    excess = (busy[row] - typical) / step
    share = _needed(policy, busy[row], typical)
    half = share / 2
    onset = _suffix(excess, half)
    # Once its size is known, half of it marks the begin better than half the threshold.
    onset = _suffix(excess, max(half, float(np.median(excess[onset:])) / 2))
    window, before = excess[onset:], excess[:onset]
    if window.size < policy.straggler_steps:
        return None
    median = float(np.median(window))
    steadiness = float(np.mean(window >= half))
    if median < share or steadiness < policy.straggler_consistency:
        return None
    changed = before.size >= policy.straggler_steps and float(np.median(before)) < median / 2
    if changed:
        # Everybody waits for a straggler: when it became slow, the step became longer.
        own = float(np.median((busy[row] - typical)[onset:]))
        rise = float(np.median(step[onset:]) - np.median(step[:onset]))
        if rise < policy.straggler_rise * own:
            return None
    rank = evidence.timeline.ranks[row]
    return Slow(row, rank, peers, alone, onset, median, steadiness, changed)


def _over(matrix: Floats | None, slow: Slow, columns: npt.NDArray[np.int64]) -> float | None:
    """Median seconds by which the rank exceeds its peers in `matrix` from the onset on."""
    if matrix is None:
        return None
    part = matrix[:, columns[slow.onset :]]
    return float(np.median(part[slow.row] - np.median(part[list(slow.peers)], axis=0)))


def _confidence(policy: Policy, slow: list[Slow], known: bool) -> Confidence:
    """Certain only for one rank that became slower than itself, strongly and steadily."""
    one = slow[0]
    strong = one.excess >= 2 * policy.straggler_share and one.consistency >= 0.9
    return "certain" if len(slow) == 1 and known and strong and one.changed else "likely"


def _findings(
    evidence: Evidence,
    policy: Policy,
    slow: list[Slow],
    steady: npt.NDArray[np.int64],
    busy: Floats,
    step: Floats,
) -> list[Finding]:
    line = evidence.timeline
    one = max(slow, key=lambda s: s.excess)
    total = _over(line.busy, one, steady) or 0.0
    need = policy.straggler_cause_share * total
    if (_over(line.summed(PAUSES), one, steady) or 0.0) >= need:
        return []  # saving or evaluating on one rank is no slowness of the rank
    data = _over(line.summed(INPUT), one, steady)
    by_input = (data or 0.0) >= need
    ranks = tuple(sorted(s.rank for s in slow))
    own = float(np.median(busy[one.row, one.onset :]))
    others = float(np.median(np.median(busy[list(one.peers)], axis=0)[one.onset :]))
    whole = float(np.median(step[one.onset :]))
    lost = seconds(max(own - others, 0.0))
    first = int(line.steps[steady[one.onset]])
    root = Finding(
        "slow.straggler-input" if by_input else "slow.straggler-compute",
        "root",
        _confidence(policy, slow, bool(line.phases)),
        _sentence(one, ranks, by_input, lost, first),
        ranks=ranks,
        evidence=tuple(_items(evidence, one, steady, first)),
        excluded=tuple(_excluded(one, by_input, data, total)),
        formula=f"(busy {seconds(own)} - peers' median {seconds(others)}) / step {seconds(whole)} "
        f"= {one.excess:.0%}",
        at_ns=int(line.start_ns[one.row, steady[one.onset]]),
    )
    if one.alone and not one.changed:
        # A stage with more layers looks the same, so this is no more than a hint.
        hint = f"Stage {evidence.stages.get(one.rank, 0)} ({ranks_words(ranks)}) is busy longest."
        return [root.but(role="context", confidence="possible", summary=hint)]
    waits = Finding(
        "slow.comm-exposed",
        "effect",
        "likely",
        f"The other {len(line.ranks) - len(ranks)} ranks spend about {lost} of each step waiting "
        "inside collectives.",
        caused_by=root.cause,
    )
    return [root, waits]


def _sentence(one: Slow, ranks: tuple[int, ...], by_input: bool, lost: str, first: int) -> str:
    what = "waits for its data" if by_input else "computes"
    if len(ranks) > 1:
        what = "wait for their data" if by_input else "compute"
    since = f" since step {first}" if one.onset > 0 else ""
    them = "it" if len(ranks) == 1 else "them"
    return (
        f"{ranks_words(ranks, capital=True)} {what} {lost} longer than "
        f"{'its' if len(ranks) == 1 else 'their'} peers in every step{since}, and all others wait "
        f"for {them} ({one.excess:.0%} of the step)."
    )


def _excluded(one: Slow, by_input: bool, data: float | None, total: float) -> list[tuple[str, str]]:
    out = []
    if data is not None and total > 0:
        share = max(data, 0.0) / total
        other = "slow.straggler-compute" if by_input else "slow.straggler-input"
        out.append((other, f"its data phase explains {share:.0%} of the excess"))
    if not one.alone:
        out.append(("slow.stage-imbalance", "other ranks of its stage are not slow"))
    out.append(
        ("slow.work-imbalance", f"it was the slow one in {one.consistency:.0%} of the steps")
    )
    return out


def _items(evidence: Evidence, one: Slow, steady: npt.NDArray[np.int64], first: int) -> list[Item]:
    line = evidence.timeline
    columns = steady[one.onset :]
    place = f"steps {first}..{int(line.steps[columns[-1]])}"
    source = f"ranks/{one.rank:05d}"
    busy = np.median(line.busy[:, columns], axis=1)
    order = sorted((i for i in range(len(line.ranks)) if i != one.row), key=lambda i: -busy[i])
    rest = ", ".join(f"rank {line.ranks[i]} {seconds(float(busy[i]))}" for i in order[:4])
    text = f"busy in each step: rank {one.rank} {seconds(float(busy[one.row]))}; {rest}"
    items = [Item(source, f"{place}, of all ranks", text + (", ..." if len(order) > 4 else ""))]
    for phase in (*INPUT, *COMPUTE):
        matrix = line.phases.get(phase)
        over = _over(matrix, one, steady)
        if matrix is None or over is None or over < 0.02 * float(np.nanmedian(line.seconds)):
            continue
        own = float(np.median(matrix[one.row, columns]))
        text = (
            f"rank {one.rank} spends {seconds(own)} in {phase}, {seconds(over)} more than its "
            "peers, waits inside it included"
        )
        items.append(Item(source, f"{place}, phase {phase}", text))
    return [*items, _last_item(evidence, one, steady, place)]


def _last_item(evidence: Evidence, one: Slow, steady: npt.NDArray[np.int64], place: str) -> Item:
    """How little the rank waited, and how often and by how much it came last."""
    ledger, line = evidence.ledger, evidence.timeline
    columns = steady[one.onset :]
    waited = np.median(line.waiting[:, columns], axis=1)
    others = float(np.median(waited[list(one.peers)]))
    found = ledger.arrivals
    issue = ledger.issue[ledger.instances.rows[ledger.instances.first[found.instance]]]
    since = issue >= line.start_ns[one.row, columns[0]]
    mine = since & (found.last_rank == one.rank)
    text = (
        f"rank {one.rank} waits for operations {seconds(float(waited[one.row]))} of a step, its "
        f"peers {seconds(others)}"
    )
    if mine.any():
        share = float(mine.sum() / since.sum())
        late = float(np.median(found.late_ns[mine]) / 1e9)
        text += f"; it came last into {share:.0%} of all collectives, {seconds(late)} late"
    return Item(f"ranks/{one.rank:05d}", f"{place}, operations", text)
