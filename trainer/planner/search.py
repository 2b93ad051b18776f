"""Every layout that a job could have, judged: the legal and fitting ones ranked, each reject told.

In: a Job, and perhaps axes that are fixed. Out: Search, fastest first; rejects with all reasons.
No torch; 10,000 candidates take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from trainer.planner import communication, memory, timing
from trainer.planner.candidate import CHECKPOINTING, Candidate, Rejected
from trainer.planner.legal import reasons

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.planner.candidate import Job

GIB = 1 << 30
MARGIN = 0.05
"""Share of a GPU's memory that a plan leaves free: the error of the formulas, and other tenants."""
_SHORTEST = 1024
"""Positions that cp leaves a rank at least, unless it is asked for: less only adds traffic."""
_MICROBATCHES = (1, 2, 4)
_VIRTUAL = (1, 2, 4)
_SAME = 0.01
"""Steps that differ by less are a tie, which the simpler layout wins."""


@dataclass(frozen=True)
class Ranked:
    """A layout that fits."""

    candidate: Candidate
    peak: float
    """Bytes of the fullest rank."""
    stage: int
    """Where that is."""
    timing: timing.Timing


@dataclass
class Search:
    """The answer."""

    job: Job
    ranked: list[Ranked] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Candidates."""
        return len(self.ranked) + len(self.rejected)


def search(job: Job, fixed: Mapping[str, Any] | None = None) -> Search:
    """All candidates of `candidates`, judged."""
    out = Search(job)
    for one in candidates(job, fixed or {}):
        judged = judge(job, one)
        if isinstance(judged, Rejected):
            out.rejected.append(judged)
        else:
            out.ranked.append(judged)
    out.ranked.sort(key=lambda ranked: ranked.timing.step)
    _settle_ties(out.ranked)
    return out


def judge(job: Job, one: Candidate) -> Ranked | Rejected:
    """One candidate."""
    wrong = reasons(job, one)
    if wrong:
        return Rejected(one, tuple(wrong))
    size, stage = memory.peak(job, one)
    if size > room(job):
        return Rejected(one, (_too_large(job, one, size, stage),), size)
    return Ranked(one, size, stage, timing.of_step(job, one))


def room(job: Job) -> float:
    """Bytes that a rank may need."""
    return job.cluster.gpu.memory * (1 - MARGIN)


def candidates(job: Job, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """Every layout worth a judgement; what is illegal as a mesh comes once, to be told why."""
    world = job.cluster.count
    for tp, pp, cp, ep in product(
        _choices(fixed, "tp", _divisors(world)),
        _choices(fixed, "pp", _divisors(world)),
        _choices(fixed, "cp", _lengths(job)),
        _choices(fixed, "ep", _experts(job)),
    ):
        if world % (tp * pp * cp) and not {"tp", "pp", "cp"} & set(fixed):
            continue
        dp = int(fixed.get("dp", max(1, world // (tp * pp * cp))))
        bare = Candidate(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
        if reasons(job, bare):
            yield bare
            continue
        yield from _variants(job, bare, fixed)


def _variants(job: Job, bare: Candidate, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """A legal mesh with every way to share state, to recompute and to run its pipeline."""
    most = job.global_batch // bare.dp
    sizes = [one for one in _MICROBATCHES if one <= most and most % one == 0]
    stages = [("1f1b", 1)]
    if bare.pp > 1:
        stages += [
            ("interleaved", one)
            for one in _VIRTUAL[1:]
            if bare.pp * one <= job.shape.layers and most % bare.pp == 0
        ]
    if "schedule" in fixed:
        name = fixed["schedule"]
        stages = [one for one in stages if one[0] == name] or [(name, int(fixed.get("virtual", 1)))]
    for zero, sp, (schedule, virtual), microbatch, kept in product(
        _choices(fixed, "zero", [0, 1, 2, 3] if bare.data > 1 else [0]),
        _choices(fixed, "sp", [bare.tp > 1]),
        stages,
        _choices(fixed, "microbatch", sizes),
        _choices(fixed, "checkpointing", list(CHECKPOINTING)),
    ):
        if virtual > 1 and most // microbatch % bare.pp:
            continue
        yield Candidate(
            bare.dp, zero, bare.tp, sp, bare.pp, virtual, schedule, bare.cp,
            fixed.get("cp_form", "ring"), bare.ep, microbatch, kept,
        )  # fmt: skip


def _choices(fixed: Mapping[str, Any], name: str, otherwise: list[Any]) -> list[Any]:
    return [fixed[name]] if name in fixed else otherwise


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _lengths(job: Job) -> list[int]:
    return [n for n in _divisors(job.cluster.count) if n == 1 or job.sequence // n >= _SHORTEST]


def _experts(job: Job) -> list[int]:
    return [n for n in _divisors(max(1, job.shape.experts)) if n <= job.cluster.count]


def _settle_ties(ranked: list[Ranked]) -> None:
    """Among steps within a percent of the fastest of them the simplest stands first."""
    at = 0
    while at < len(ranked):
        limit = ranked[at].timing.step * (1 + _SAME)
        end = at
        while end < len(ranked) and ranked[end].timing.step <= limit:
            end += 1
        ranked[at:end] = sorted(ranked[at:end], key=lambda one: (*_axes(one.candidate), one.peak))
        at = end


def _axes(one: Candidate) -> tuple[int, ...]:
    """How much there is to set up and to go wrong: axes, then those that are tried last."""
    on = [size > 1 for size in (one.cp, one.pp, one.virtual, one.tp, one.ep)]
    return (sum(on), *on, one.zero)


def _too_large(job: Job, one: Candidate, size: float, stage: int) -> str:
    parts = memory.of_stage(job, one, stage)
    most = sorted(parts, key=lambda name: -parts[name])[:2]
    told = " and ".join(f"{parts[name] / GIB:.1f} GiB of {name}" for name in most)
    where = f"stage {stage}" if one.pp > 1 else "every rank"
    return (
        f"{where} needs {size / GIB:.1f} GiB, and a {job.cluster.gpu.name} has "
        f"{job.cluster.gpu.memory / GIB:.1f}, of which {MARGIN:.0%} stay free; {told}"
    )


def comm_bytes(job: Job, one: Candidate) -> dict[str, float]:
    """Bytes that a rank sends in a step, of the axes that are there."""
    return {axis: size for axis, size in communication.sent_by_axis(job, one).items() if size}
