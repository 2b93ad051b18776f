"""Foreign text made harmless, and figures in words, for all forms of the report.

Quotes come from logs and dumps that anybody may have written: what a terminal would obey (escape
sequences, control characters, changes of writing direction) must not reach it.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from collectors.readers.quote import bare
from playbooks.words import seconds, size

if TYPE_CHECKING:
    from collections.abc import Mapping

_CROWDED = 0.1
"""Share of the step that ranks wait for a core from which a reader should know it."""
_DANGEROUS = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def plain(text: object) -> str:
    """`text` on one line, without escape sequences, control and format characters."""
    out = []
    for one in bare(str(text)):
        if one in "\t\n\r":
            out.append(" ")
        elif unicodedata.category(one) not in _DANGEROUS:
            out.append(one)
    return "".join(out)


def percent(share: float | None) -> str:
    """ "12 %", "unknown"."""
    return "unknown" if share is None else f"{share * 100:.0f} %"


def numbers(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a person reads first, as (name, value with unit); what is unknown is absent."""
    out: list[tuple[str, str]] = []
    if metrics.get("steps"):
        out.append(("steps", str(metrics["steps"])))
    if metrics.get("step_time_s") is not None:
        spread = metrics.get("step_time_spread")
        tail = "" if spread is None else f" (spread {percent(spread)})"
        out.append(("step time", seconds(metrics["step_time_s"]) + tail))
    if metrics.get("tokens_per_s") is not None:
        out.append(("throughput", f"{metrics['tokens_per_s']:,.0f} tokens/s"))
    loss = metrics.get("loss")
    if loss:
        out.append(("loss", f"{loss['first']:.4g} to {loss['last']:.4g}"))
    shares = _shares(metrics.get("phase_shares") or {})
    if shares:
        out.append(("time goes to", shares))
    if (metrics.get("core_wait_share") or 0.0) >= _CROWDED:
        text = f"{percent(metrics['core_wait_share'])} of the step: ranks share too few cores"
        out.append(("core wait", text))
    device = list((metrics.get("device_time") or {}).values())
    if device:
        out.append(("device time", _device(device)))
    waited = metrics.get("exposed_comm") or {}
    known = {axis: value for axis, value in waited.items() if value is not None}
    if known:
        text = ", ".join(f"{plain(axis)} {seconds(value)}" for axis, value in known.items())
        out.append(("waited for", f"{text} a step"))
    out += _waits(metrics)
    out += _memory(metrics)
    if metrics.get("collectives"):
        out.append(("operations", f"{metrics['collectives']:,} recorded"))
    return out


def _waits(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Who waits for whom: arrivals, the bubble, and what an even job would take."""
    out: list[tuple[str, str]] = []
    skew = metrics.get("arrival_skew")
    if skew:
        out.append(
            ("arrival skew", f"{seconds(skew['median_s'])} median, {seconds(skew['p95_s'])} p95")
        )
    bubble = metrics.get("bubble")
    if bubble:
        text = f"predicted {percent(bubble['predicted'])}, measured {percent(bubble['measured'])}"
        out.append(("bubble", text))
    again = metrics.get("what_if")
    saved = 1 - again["ordinary_s"] / again["replayed_s"] if again else 0.0
    if again and saved >= 0.01:
        text = f"{seconds(again['ordinary_s'])} a step, {percent(saved)} less (by replay)"
        out.append(("if all even", text))
    return out


def _memory(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The largest peak of any rank."""
    out: list[tuple[str, str]] = []
    peaks = list((metrics.get("peak_memory") or {}).values())
    for name, key in (("device memory", "device"), ("process memory", "rss")):
        values = [p[key] for p in peaks if p.get(key) is not None]
        if values:
            out.append((name, f"{size(max(values))} at most on a rank"))
    return out


def _device(traces: list[Mapping[str, Any]]) -> str:
    """Mean over traces: "compute 40 %, exposed communication 20 %, ... (overlap 35 %)"."""
    names = {"compute": "compute", "exposed": "exposed communication", "memory": "copies"}
    mean = {p: sum(t[p] for t in traces) / len(traces) for p in (*names, "idle")}
    text = ", ".join(f"{names.get(p, p)} {percent(value)}" for p, value in mean.items())
    overlaps = [t["overlap"] for t in traces if t["overlap"] is not None]
    if overlaps:
        text += f" ({percent(sum(overlaps) / len(overlaps))} of communication overlapped)"
    return text


def _shares(by_rank: Mapping[str, Mapping[str, float]]) -> str:
    """ "forward 31 %, backward 52 %, ...": mean over ranks, largest first, nothing below 1 %."""
    names = {name for one in by_rank.values() for name in one}
    mean = {n: sum(one.get(n, 0.0) for one in by_rank.values()) / len(by_rank) for n in names}
    order = sorted(mean, key=lambda name: (-mean[name], name))
    return ", ".join(f"{plain(n)} {percent(mean[n])}" for n in order if mean[n] >= 0.005)


def coverage(world_size: int | None, seen: int, missing: int) -> str:
    """ "8 of 8 ranks seen", "3 ranks seen, world size unknown"."""
    if world_size is None:
        return f"{seen} ranks seen, world size unknown" if seen else "no rank seen"
    tail = f", {missing} left nothing" if missing else ""
    return f"{seen} of {world_size} ranks seen{tail}"
