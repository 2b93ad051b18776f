"""Out of memory on one pipeline stage: by what it holds of the model, or of microbatches in flight.

In: the ranks that failed, parameters and peaks that ranks printed. Out: oom.stage-imbalance where
the failing ranks hold far more parameters than the others; oom.pipeline-inflight where peaks fall
evenly from the first stage on, as 1F1B keeps p - s microbatches on stage s (Narayanan et al. 2021);
None where neither is told.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING

from playbooks import logs
from playbooks.words import ranks_words, size

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy
    from playbooks.rules.memory import Message

Told = dict[int, tuple[float, "dict[str, Any]"]]
"""Rank -> (value, the line that says it)."""


def decide(
    evidence: Evidence, policy: Policy, base: Finding, message: Message, asked: str
) -> Finding | None:
    """The finding when stages differ as one of the two causes has it."""
    if not base.ranks:
        return None
    return _heavier(evidence, policy, base, asked) or _in_flight(
        evidence, policy, base, message, asked
    )


def _told(evidence: Evidence, kind: str, names: Iterable[str]) -> Told:
    """The largest value of each rank under any of these names."""
    out: Told = {}
    for row, fields in evidence.story.of(kind):
        rank = row["rank"]
        values = [fields[n] for n in names if isinstance(fields.get(n), int | float)]
        if rank is not None and values and max(values) > out.get(rank, (0.0, row))[0]:
            out[rank] = (float(max(values)), row)
    return out


def _heavier(evidence: Evidence, policy: Policy, base: Finding, asked: str) -> Finding | None:
    """The failing ranks hold more parameters than all others."""
    told = _told(evidence, "train.size", ("parameters",))
    own = [told[rank][0] for rank in base.ranks if rank in told]
    others = [value for rank, (value, _) in told.items() if rank not in base.ranks]
    if not own or len(others) < 2 or min(own) < policy.stage_excess * max(others):
        return None
    typical = median(others)
    room = next(rank for rank in told if rank not in base.ranks)
    return base.but(
        cause="oom.stage-imbalance",
        confidence="likely",
        summary=f"{asked}; {ranks_words(base.ranks)} hold {min(own) / 1e9:.2f} B parameters, the "
        f"other ranks {typical / 1e9:.2f} B: their stage carries more of the model.",
        formula=f"at 16 B a parameter {size(int(min(own) * 16))} against "
        f"{size(int(typical * 16))} of states",
        axis="pp",
        evidence=(
            *base.evidence,
            logs.item(told[base.ranks[0]][1] if base.ranks[0] in told else told[room][1]),
            logs.item(told[room][1]),
        ),
        excluded=(
            ("oom.model-states", "the other stages have room"),
            ("oom.pipeline-inflight", "the stages differ in parameters already"),
        ),
    )


def _in_flight(
    evidence: Evidence, policy: Policy, base: Finding, message: Message, asked: str
) -> Finding | None:
    """Peaks fall evenly from stage to stage, and the first stage fails."""
    peaks = _told(evidence, "train.step", ("peak",))
    stages = _stages(peaks, policy)
    if len(stages) < 3 or min(base.ranks) > min(peaks):
        return None
    falls = [a - b for (a, _), (b, _) in pairwise(stages)]
    step = mean(falls)
    even = min(falls) > 0 and pstdev(falls) <= policy.stage_even * step
    if not even or step < policy.stage_fall * stages[0][0]:
        return None
    held = round(stages[0][0] / step) if message.allocated is None else len(stages)
    return base.but(
        cause="oom.pipeline-inflight",
        confidence="likely",
        summary=f"{asked}; peaks fall by about {size(int(step))} from each stage to the next, "
        f"which is one microbatch in flight less: the first stage holds {held} at once.",
        formula=f"peak of stage s = rest + (p - s) x {size(int(step))}; first "
        f"{size(int(stages[0][0]))}, last {size(int(stages[-1][0]))}",
        axis="pp",
        evidence=(*base.evidence, *(logs.item(row) for _, row in (stages[0], stages[-1]))),
        excluded=(
            ("oom.activations", "one microbatch in flight fits: the last stage has room"),
            ("oom.stage-imbalance", "the difference follows the number in flight"),
        ),
    )


def _stages(peaks: Told, policy: Policy) -> list[tuple[float, dict[str, Any]]]:
    """The peak of each stage in order: neighbouring ranks of like peaks are one."""
    out: list[tuple[float, dict[str, Any]]] = []
    for rank in sorted(peaks):
        value, row = peaks[rank]
        if out and abs(value / out[-1][0] - 1) <= policy.stage_alike:
            continue
        out.append((value, row))
    return out
