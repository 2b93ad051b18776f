"""What the step would take without stragglers: by running it again with ordinary durations.

Ordinary is the mean of a stretch of computation over all ranks and steps, and the median of a
transfer (Lin et al., OSDI 2025). Everything else follows from who waits for whom.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from playbooks import programs, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from playbooks.evidence import Evidence
    from playbooks.policy import Policy
    from playbooks.replay import Program, Transfer, Work

    Chosen = Callable[[Work | Transfer], bool]

FORMULAS = {
    "what_if": "replay of sampled steps; ordinary_s: every stretch takes its mean over ranks and "
    "steps, every transfer its median; slowdown S = replayed_s / ordinary_s; a part's slowdown: "
    "only it keeps its own durations, / ordinary_s; its share: (replayed_s - step with only it "
    "made ordinary) / (replayed_s - ordinary_s)",
}


def measure(evidence: Evidence, policy: Policy) -> dict[str, Any]:
    """Key: what_if {steps, measured_s, replayed_s, ordinary_s, slowdown, by_stage, by_rank,
    by_kind}; None where no step can be replayed, or the replay is not what was measured."""
    return {"what_if": answer(evidence, policy)}


_known: WeakKeyDictionary[Evidence, tuple[Policy, dict[str, Any] | None]] = WeakKeyDictionary()
"""Answers of evidence that is still in use: metrics and rules ask the same question."""


def answer(evidence: Evidence, policy: Policy) -> dict[str, Any] | None:
    """The value of `what_if`, worked out once."""
    if evidence not in _known or _known[evidence][0] != policy:
        _known[evidence] = (policy, _what_if(evidence, policy))
    return _known[evidence][1]


def _what_if(evidence: Evidence, policy: Policy) -> dict[str, Any] | None:
    chosen = _sampled(evidence, policy)
    if not chosen:
        return None
    again = _Replay(chosen)
    try:
        real = again.mean(lambda _: True)
        ordinary = again.mean(lambda _: False)
    except ValueError:  # an incomplete ledger: its operations wait for rows that are not there
        return None
    measured = float(np.mean([one.seconds for one in chosen]))
    if ordinary <= 0 or abs(real / measured - 1) > policy.replay_error:
        return None
    stages = evidence.stages
    ranks = sorted(chosen[0].events)
    kinds = sorted({_kind(x) for x in again.everything})
    few = len(ranks) <= policy.replay_ranks
    return {
        "steps": len(chosen),
        "measured_s": measured,
        "replayed_s": real,
        "ordinary_s": ordinary,
        "slowdown": real / ordinary,
        "by_stage": {
            str(stage): again.part(_of_stage(stages, stage), real, ordinary)
            for stage in sorted(set(stages.values()))
        },
        "by_rank": {
            str(rank): again.part(_of_rank(rank), real, ordinary) for rank in (ranks if few else [])
        },
        "by_kind": {kind: again.part(_of_kind(kind), real, ordinary) for kind in kinds},
    }


def _sampled(evidence: Evidence, policy: Policy) -> list[Program]:
    """Programs of steps spread over the run, as many as the policy's bound on events allows."""
    line = evidence.timeline
    steady = line.steady(policy.warmup_steps)
    if steady.size == 0 or len(line.ranks) < 2 or not len(evidence.ledger):
        return []
    per_step = len(evidence.ledger) * 4 / max(1, line.steps.size)
    most = int(min(policy.replay_steps, policy.replay_events // max(1.0, per_step)))
    if most < 1:
        return []
    places = np.unique(np.linspace(0, steady.size - 1, most).round().astype(np.int64))
    return programs.programs(evidence, line.steps[steady[places]].tolist())


def _of_stage(stages: Mapping[int, int], stage: int) -> Chosen:
    return lambda one: stages.get(one.rank) == stage


def _of_rank(rank: int) -> Chosen:
    return lambda one: one.rank == rank


def _of_kind(kind: str) -> Chosen:
    return lambda one: _kind(one) == kind


def _kind(one: Work | Transfer) -> str:
    """The phase of a stretch; axis and operation of a transfer."""
    return one.label[0] if isinstance(one, replay.Work) else " ".join(one.label)


class _Replay:
    """Sampled steps and the ordinary duration of everything in them."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs
        self.everything = [
            event if isinstance(event, replay.Work) else event.part
            for program in programs
            for events in program.events.values()
            for event in events
            if not isinstance(event, replay.Await)
        ]
        found: dict[Any, list[float]] = defaultdict(list)
        for one in self.everything:
            found[one.label].append(one.seconds)
        works = {one.label for one in self.everything if isinstance(one, replay.Work)}
        self.ordinary = {
            label: float(np.mean(values) if label in works else np.median(values))
            for label, values in found.items()
        }

    def mean(self, own: Chosen) -> float:
        """Mean step when what `own` chooses keeps its durations and the rest is ordinary."""

        def seconds(one: Work | Transfer) -> float:
            return one.seconds if own(one) else self.ordinary[one.label]

        return float(np.mean([replay.run(program, seconds) for program in self.programs]))

    def part(self, own: Chosen, real: float, ordinary: float) -> dict[str, float | None]:
        """Slowdown and share of what `own` chooses."""
        without = self.mean(lambda one: not own(one))
        lost = real - ordinary
        share = (real - without) / lost if lost > 1e-9 * ordinary else None
        return {"slowdown": self.mean(own) / ordinary, "share": share}
