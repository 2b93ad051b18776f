"""Two runs side by side: what changed between them, and whether it matters.

In: Evidence, metrics and verdict of each (A is the one that is known, B the one in question).
Out: `Comparison`: facts that differ, numbers with an interval of their ratio, and one sentence.
A number counts as changed only when the whole interval of B / A lies beyond the policy's least
change: what noise can explain is said to be the same, and what was too short to tell is unknown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from playbooks import differing
from playbooks.metrics import memory
from playbooks.metrics.resampling import ratio

if TYPE_CHECKING:
    import numpy.typing as npt

    from playbooks.evidence import Evidence
    from playbooks.policy import Policy
    from playbooks.report.model import Report

    Floats = npt.NDArray[np.float64]

SCHEMA = "diag.compare/1"
FORMULA = (
    "ratio = median(B) / median(A) over measured steps; low and high: 95 % of moving-block "
    "bootstrap resamples (Kuensch 1989), blocks of sqrt(n) steps"
)


@dataclass(frozen=True)
class Number:
    """One measured quantity of both runs."""

    name: str
    unit: str
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    """better, worse, same, or unknown (too few steps, or one run lacks it)."""


@dataclass(frozen=True)
class Side:
    """One run: its words and its answer."""

    name: str
    evidence: Evidence = field(hash=False)
    report: Report = field(hash=False)

    @property
    def answer(self) -> str:
        """The verdict's sentence, or what stands in its place."""
        if self.report.verdict is not None:
            return self.report.verdict.summary
        if self.report.abstained is not None:
            return f"no verdict: {self.report.abstained.because}"
        return self.report.health.summary if self.report.health else ""

    @property
    def cause(self) -> str | None:
        """The id of the root cause; None without one."""
        return self.report.verdict.cause if self.report.verdict else None


@dataclass(frozen=True)
class Comparison:
    """The answer."""

    a: Side
    b: Side
    facts: tuple[differing.Fact, ...]
    numbers: tuple[Number, ...]
    losses: str | None
    """Where the losses of equal steps part; None where there is nothing to compare."""
    summary: str
    regression: bool
    """B has a root cause that A lacks, or a number of it is worse beyond noise."""

    def as_json(self) -> dict[str, Any]:
        """The mapping of schema `diag.compare/1`."""
        return {
            "schema": SCHEMA,
            "runs": {
                key: {"name": side.name, "cause": side.cause, "summary": side.answer}
                for key, side in (("a", self.a), ("b", self.b))
            },
            "changed": [asdict(f) for f in self.facts],
            "numbers": [asdict(n) for n in self.numbers],
            "losses": self.losses,
            "summary": self.summary,
            "regression": self.regression,
            "formula": FORMULA,
        }


def compare(a: Side, b: Side, policy: Policy) -> Comparison:
    """What changed from `a` to `b`."""
    facts = tuple(differing.facts(a.evidence, b.evidence))
    numbers = tuple(_numbers(a.evidence, b.evidence, policy))
    worse = [n for n in numbers if n.verdict == "worse"]
    new = b.cause is not None and b.cause != a.cause
    return Comparison(
        a,
        b,
        facts,
        numbers,
        losses=_losses(a.evidence, b.evidence, policy),
        summary=_summary(b if new else None, numbers, len(facts)),
        regression=bool(worse) or new,
    )


def _numbers(a: Evidence, b: Evidence, policy: Policy) -> list[Number]:
    """Step time first, then the rate of tokens, what the step is spent on, and memory."""
    ours, theirs = _seconds(a, policy), _seconds(b, policy)
    step = float(np.median(ours["step time"])) if "step time" in ours else None
    out = [
        _judged(name, (ours.get(name), theirs.get(name)), step, policy)
        for name in dict.fromkeys([*ours, *theirs])
    ]
    rates = _tokens(a, policy), _tokens(b, policy)
    if any(one is not None for one in rates):
        out.insert(1, _judged("tokens/s", rates, None, policy))
    peaks = _peak(a, policy), _peak(b, policy)
    if any(one is not None for one in peaks):
        out.append(_memory(*peaks, policy))
    return out


def _seconds(evidence: Evidence, policy: Policy) -> dict[str, Floats]:
    """For each measured step its time, and the median rank's time in each phase and in waits."""
    line = evidence.timeline
    steady = line.steady(policy.warmup_steps)
    if not steady.size:
        return {}
    phases = {name: np.median(m[:, steady], axis=0) for name, m in sorted(line.phases.items())}
    waits = {"waiting for peers": np.median(line.waiting[:, steady], axis=0)}
    return {"step time": line.seconds[:, steady].max(axis=0), **phases, **waits}


def _tokens(evidence: Evidence, policy: Policy) -> Floats | None:
    """Tokens a second of each measured step."""
    line = evidence.timeline
    steady = line.steady(policy.warmup_steps)
    tokens = line.tokens[steady]
    if not steady.size or np.isnan(tokens).any():
        return None
    rate: Floats = tokens / line.seconds[:, steady].max(axis=0)
    return rate


def _peak(evidence: Evidence, policy: Policy) -> int | None:
    """The largest memory of any rank: of its device, else of its process."""
    peaks = memory.measure(evidence, policy)["peak_memory"].values()
    found = [one["device"] if one["device"] is not None else one["rss"] for one in peaks]
    return max((value for value in found if value is not None), default=None)


def _judged(
    name: str, both: tuple[Floats | None, Floats | None], step: float | None, policy: Policy
) -> Number:
    """A number with its interval; what is a part of the step must matter to the step."""
    a, b = both
    unit, up = ("1/s", True) if name == "tokens/s" else ("s", False)
    before, after = (None if one is None else float(np.median(one)) for one in both)
    found = None if a is None or b is None else ratio(a, b)
    if found is None or before is None or after is None:
        return Number(name, unit, before, after, None, None, None, "unknown")
    small = step is not None and abs(after - before) < policy.compare_least * step
    verdict = "same"
    if not small and found.low > 1 + policy.compare_least:
        verdict = "better" if up else "worse"
    elif not small and found.high < 1 - policy.compare_least:
        verdict = "worse" if up else "better"
    return Number(name, unit, before, after, found.value, found.low, found.high, verdict)


def _memory(a: int | None, b: int | None, policy: Policy) -> Number:
    """Peaks have no interval: they repeat to a few percent, or the job changed."""
    if not a or b is None:
        return Number("peak memory", "B", a, b, None, None, None, "unknown")
    value = b / a
    beyond = abs(value - 1) > policy.compare_least_memory
    verdict = ("worse" if value > 1 else "better") if beyond else "same"
    return Number("peak memory", "B", a, b, value, None, None, verdict)


def _losses(a: Evidence, b: Evidence, policy: Policy) -> str | None:
    """How far the losses of the same steps are apart."""
    ours = dict(zip(a.timeline.steps.tolist(), a.timeline.loss.tolist(), strict=True))
    theirs = dict(zip(b.timeline.steps.tolist(), b.timeline.loss.tolist(), strict=True))
    shared = [s for s in ours if s in theirs and not np.isnan(ours[s]) and not np.isnan(theirs[s])]
    if not shared:
        return None
    apart = {s: abs(theirs[s] - ours[s]) / max(abs(ours[s]), 1e-12) for s in shared}
    first = next((s for s in shared if not apart[s] <= policy.compare_loss), None)
    if first is None:
        return f"equal in all {len(shared)} shared steps (to {policy.compare_loss:g} relative)"
    return (
        f"apart from step {first} on ({ours[first]:.6g} and {theirs[first]:.6g}); "
        f"at step {shared[-1]} {ours[shared[-1]]:.6g} and {theirs[shared[-1]]:.6g}"
    )


def _summary(new: Side | None, numbers: tuple[Number, ...], facts: int) -> str:
    """One sentence: the new cause, else the numbers that moved, else that none did."""
    if new is not None:
        return f"B has what A had not ({new.cause}): {new.answer}"
    moved = [n for n in numbers if n.verdict in {"worse", "better"}]
    changed = f"{facts} thing(s) differ between the runs" if facts else "nothing else differs"
    if moved:
        first = moved[0]
        share = (first.ratio or 1.0) - 1.0
        more = ", ".join(f"{n.name} {(n.ratio or 1.0) - 1.0:+.0%}" for n in moved[1:4])
        tail = f" ({more})" if more else ""
        return f"B is {first.verdict}: {first.name} {share:+.1%}{tail}; {changed}."
    if not any(n.verdict == "same" for n in numbers):
        return f"Too few measured steps in both runs to compare numbers; {changed}."
    return f"No number moved beyond noise; {changed}."
