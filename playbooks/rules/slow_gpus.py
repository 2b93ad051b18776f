"""GPUs below their clock: slow.gpu-throttled.

In: samples of GPUs (queries, reports, dmon, lines of a trainer). Out: at most one root. Compared
with peers under load, or with the highest clock where all of a pile are held down; a power cap with
the draw at an unchanged limit is the normal state of a busy GPU.
"""

from __future__ import annotations

from pathlib import PurePath
from statistics import median
from typing import TYPE_CHECKING

from playbooks.lines import Event
from playbooks.rules import slow_ranks
from playbooks.rules.naming import root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.policy import Policy

_THERMAL, _BRAKE, _CAP, _SET = 0x20 | 0x40, 0x8 | 0x80, 0x4, 0x2


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """GPUs with a reason and a lower clock."""
    samples = [e for e in evidence.lines.of("gpu.sample") if (e.number("sm_clock") or 0) > 0]
    samples += _told(evidence)
    loaded = [e for e in samples if not _idle(e, policy)]
    if len(samples) < 2 or not loaded:
        return []
    out = _slower(loaded, policy)
    if not out:
        return []
    behind = slow_ranks.rule(evidence, policy)
    slow = behind[0].ranks if behind else ()
    return [_finding(evidence, out, loaded, slow)]


def _told(evidence: Evidence) -> list[Event]:
    """Clocks in lines and tables of a trainer, as samples: the last one of each unit."""
    out: dict[str, Event] = {}
    for part in evidence.breakdown.parts:
        clock = part.values.get("clock")
        index = part.who.get("gpu", part.who.get("rank"))
        if clock is None or not part.events:
            continue
        names = {"power": "power", "power_limit": "limit", "power_default": "limit_default"}
        names |= {"temperature": "temperature", "sm_clock_max": "clock_max"}
        fields = {k: part.values[v] for k, v in names.items() if v in part.values}
        event = part.events[0]
        if "util" in part.shares:
            fields["utilization"] = 100 * part.shares["util"]
        told = {"rank": part.who.get("rank"), "host": part.who.get("host"), "index": index}
        fields |= {k: v for k, v in told.items() if v is not None}
        fields |= {"sm_clock": clock, "throttle": event.number("throttle") or 0}
        out[str(part.who)] = Event("gpu.sample", fields, event.row)
    return list(out.values())


def _idle(event: Event, policy: Policy) -> bool:
    used = event.number("utilization")
    return used is not None and used < policy.gpu_idle


def _reason(event: Event, policy: Policy, usual: float) -> str | None:
    """Why this GPU is held down; None where nothing on record says so."""
    bits = int(event.number("throttle") or 0)
    if bits & _THERMAL:
        return "thermal"
    if bits & _BRAKE:
        return "power-brake"
    clock = event.number("sm_clock") or 0
    limit, default = event.number("power_limit"), event.number("power_default")
    lowered = default is not None and limit is not None and limit < policy.throttled_clock * default
    if lowered or (bits & _CAP and not _at_limit(event, policy)):
        return "power-cap"
    if bits & _SET and clock <= policy.throttled_clock * usual:
        return "clock-limit"
    return None


def _at_limit(event: Event, policy: Policy) -> bool:
    """Whether the draw is at the limit."""
    power, limit = event.number("power"), event.number("power_limit")
    return not (power is not None and limit is not None and power < policy.power_at_limit * limit)


def _slower(samples: list[Event], policy: Policy) -> list[tuple[Event, str, float]]:
    """(sample, reason, the clock it should have)."""
    clocks = [e.number("sm_clock") or 0.0 for e in samples]
    top = max(clocks)
    limits = [v for e in samples if (v := e.number("power_limit")) is not None]
    usual_limit = median(limits) if limits else None
    usual = median(c for c in clocks if c >= policy.throttled_clock * top)
    out = []
    for event in samples:
        clock = event.number("sm_clock") or 0.0
        reason = _reason(event, policy, usual)
        limit = event.number("power_limit")
        if (
            reason is None
            and limit
            and usual_limit
            and limit < policy.throttled_clock * usual_limit
        ):
            reason = "power-cap"
        rated = event.number("sm_clock_max") or 0.0
        held = reason in ("thermal", "power-brake") and rated and clock <= policy.held_clock * rated
        if reason is not None and clock <= policy.throttled_clock * usual:
            out.append((event, reason, usual))
        elif reason is not None and held:
            out.append((event, reason, rated))
    peers = [o for o in out if o[2] == usual]
    return out if len(peers) * 2 <= len(samples) or len(peers) != len(out) else []


def _finding(
    evidence: Evidence,
    out: list[tuple[Event, str, float]],
    samples: list[Event],
    slow: tuple[int, ...],
) -> Finding:
    event, reason, usual = min(out, key=lambda o: o[0].number("sm_clock") or 0)
    ranks = _ranks(evidence, [e for e, _, _ in out], samples, slow)
    heat, limit = event.number("temperature"), event.number("power_limit")
    default = event.number("power_default")
    extra = f" at {heat:g} degC" if heat is not None else ""
    if reason == "power-cap" and limit is not None:
        extra += f", limit {limit:g} W" + (f" of {default:g} W" if default else "")
    sure: Confidence = "certain" if ranks and ranks == slow else "likely"
    index = int(event.number("index") or 0)
    held = [e for e, _, _ in out]
    places = {e.label for e in held}
    what = f"GPU {index} on {event.label} runs"
    if len(held) > 1 and len(places) == 1:
        what = f"{len(held)} GPUs on {event.label} run"
    elif len(held) > 1:
        what = f"{len(held)} GPUs on {len(places)} hosts run"
    other = next((e for e in samples if e not in held), None)
    return root(
        "slow.gpu-throttled",
        sure,
        (
            f"{what} at {event.number('sm_clock'):g} MHz{extra} ({reason}), where {usual:g} "
            f"MHz is usual"
        )
        + (f"; {ranks_words(ranks)} computes longer than all others." if ranks else "."),
        [*held[:4], *([other] if other else [])],
        ranks=ranks,
        where=reason,
        excluded=(
            ("slow.straggler-compute", "a throttle reason and a lower clock are on record"),
            ("slow.comm-exposed", "the others wait for it inside collectives"),
            ("slow.work-imbalance", "its clock is lower, its work equal"),
            ("link.pcie-degraded", "kernels, not copies, are slower"),
        ),
        formula=f"{event.number('sm_clock'):g} / {usual:g} MHz",
    )


def _ranks(
    evidence: Evidence, events: list[Event], samples: list[Event], slow: tuple[int, ...]
) -> tuple[int, ...]:
    """Ranks on those GPUs: as told, by NCCL's lines, by hosts, else slow ranks of that index."""
    told = {int(r) for e in events if (r := e.number("rank")) is not None}
    if told:
        return tuple(sorted(told))
    ranks = {
        rank
        for event in events
        for rank, process in evidence.nccl.of_rank.items()
        if process.host == event.host and process.gpu == event.number("index")
    }
    if ranks:
        return tuple(sorted(ranks))
    own = {int(e.number("index") or 0) for e in events}
    size = max(int(e.number("index") or 0) for e in samples) + 1
    names = {n for e in events for n in (e.host, PurePath(e.row["source"] or "").stem) if n}
    for part in evidence.breakdown.parts:
        host, span = part.who.get("host"), part.who.get("ranks")
        if span and host is not None and str(host) in names:
            ranks.update(r for r in range(span[0], span[1] + 1) if (r - span[0]) % size in own)
    if ranks:
        return tuple(sorted(ranks))
    return tuple(r for r in slow if r % size in own)
