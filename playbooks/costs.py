"""What communication costs, as programs print it: shares of a step, and rates.

In: Evidence; a pattern of words. Out: the median share of step time of timings whose name fits, and
the median rate of numbers in GB/s whose words fit, each with a line. None where nobody printed any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.lines import Event

WORDS = {
    "tp": re.compile(r"\btp\b|tensor", re.IGNORECASE),
    "cp": re.compile(r"\bcp\b|\bring\b|context|\bkv\b", re.IGNORECASE),
    "ep": re.compile(r"\bep\b|a2a|all[ _-]?to[ _-]?all|dispatch|combine|expert", re.IGNORECASE),
    "dp": re.compile(r"\bdp\b|grad|all[ _-]?reduce|reduce[ _-]?scatter|fsdp|ddp", re.IGNORECASE),
}
"""Words that say of which axis a number is."""
COMMUNICATION = re.compile(
    r"\bcomm\w*|expos\w*|all[ _-]?reduce|all[ _-]?gather|reduce[ _-]?scatter|a2a|"
    r"all[ _-]?to[ _-]?all|nccl|\bwait\b|sync",
    re.IGNORECASE,
)
_QUANTITIES = {"comm", "allgather", "reducescatter", "allreduce", "a2a", "p2p", "wait"}

_BANDWIDTH = re.compile(r"\b(?:bus ?|alg ?)?bw\b|busbw|algbw|bandwidth", re.IGNORECASE)
"""A bare number of that name is a rate, not a time."""


@dataclass(frozen=True)
class Cost:
    """A typical value and a line that shows it."""

    value: float
    event: Event
    lines: int


def _typical(found: list[tuple[float, Event]]) -> Cost | None:
    if not found:
        return None
    middle = median(v for v, _ in found)
    shown = min(found, key=lambda f: abs(f[0] - middle))[1]
    return Cost(middle, shown, len(found))


def share(evidence: Evidence, words: re.Pattern[str], source: str | None = None) -> Cost | None:
    """Share of the step that communication whose name fits `words` takes, exposed as printed."""
    found = []
    for event in evidence.lines.of("train.timing"):
        if source is None or event.row["source"] == source:
            one = one_share(event, words)
            if one is not None:
                found.append((one, event))
    return _typical(found)


def one_share(event: Event, words: re.Pattern[str]) -> float | None:
    """The share in one line of timings; None when it holds none."""
    values = event.fields.get("values")
    rows = [v for v in values if isinstance(v, list) and len(v) == 4] if values else []
    whole = event.number("step_s")
    unit = "s"
    for quantity, number, its_unit, _name in rows:
        if quantity == "step" and isinstance(number, int | float) and number > 0:
            whole, unit = float(number), str(its_unit)
    total = 0.0
    for quantity, number, its_unit, name in rows:
        if quantity not in _QUANTITIES or not words.search(str(name)) or _BANDWIDTH.search(name):
            continue
        if its_unit == "share":
            total += float(number)
        elif whole and its_unit in ("", unit):
            total += float(number) / whole
        else:
            return None
    return total if 0 < total <= 1 else None


def rate(evidence: Evidence, words: re.Pattern[str]) -> Cost | None:
    """GB/s that communication whose words fit reached."""
    return _typical(
        [
            (value, e)
            for e in evidence.lines.of("comm.rate")
            if (value := e.number("rate")) is not None and words.search(e.text("text"))
        ]
    )
