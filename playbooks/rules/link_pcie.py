"""PCIe links below their rating: link.pcie-degraded.

In: width and generation of GPUs now and at most (CSV, `nvidia-smi -q`, XML), edges that NCCL models
(GRAPH dump, topology XML), rates reached. Out: at most one root. A generation counts under load
only, for it drops at idle by design; a width that all GPUs of a host have is how the host was
built; a modelled edge counts only with a rate that it can have cost.

    bandwidth of a link, one direction = lanes * GB/s of a lane of its generation
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from playbooks.benchmarks import lowest, reached
from playbooks.rules.naming import broke, root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane, one direction, by generation (PCI Express base specifications 1 to 6)."""


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """What a GPU reports of its own link, else what NCCL models."""
    if broke(evidence):
        return []
    return _reported(evidence, policy) or _modelled(evidence, policy)


# --- what GPUs report -------------------------------------------------------------------------


def _reported(evidence: Evidence, policy: Policy) -> list[Finding]:
    hosts: dict[str, list[Event]] = defaultdict(list)
    for event in evidence.lines.of("gpu.bus", "gpu.sample"):
        if event.number("gen") is not None or event.number("width") is not None:
            hosts[event.place].append(event)
    for place in sorted(hosts):
        found = _host(evidence, policy, hosts[place])
        if found:
            return found
    return []


def _host(evidence: Evidence, policy: Policy, readings: list[Event]) -> list[Finding]:
    narrow = [e for e in readings if _below(e, "width")]
    slow = [e for e in readings if _below(e, "gen") and loaded(e, policy)]
    gpus = {e.number("index") for e in readings}
    bad = narrow or slow
    if not bad:
        return []
    culprits = sorted({int(e.number("index") or 0) for e in bad})
    alike = len(culprits) == len(gpus)
    if narrow and alike and not _worse_than_built(narrow):
        return []
    where = "width" if narrow else "generation"
    first = bad[0]
    names = ", ".join(f"GPU {i}" for i in culprits)
    what = (
        f"x{first.number('width'):g} of x{first.number('width_max'):g}"
        if narrow
        else f"generation {first.number('gen'):g} of {first.number('gen_max'):g} under load"
    )
    replays = first.number("replays") or 0
    told = f", with {replays:.0f} replays" if replays else ""
    return [
        root(
            "link.pcie-degraded",
            "possible" if alike and len(gpus) > 1 and not narrow else "likely",
            f"PCIe of {names} on {first.label} runs at {what}{told}"
            + ("." if alike else "; the host's other GPUs run at their rating."),
            _once(bad),
            ranks=_ranks(evidence, first, culprits, len(gpus)),
            where=where,
            excluded=(
                ("slow.gpu-throttled", "the link, not the clock, is below its rating"),
                ("slow.straggler-compute", "copies, not kernels, are slower on that GPU"),
                ("slow.straggler-input", "the copy to the GPU, not the batch, is late"),
                ("slow.data-bound", "one GPU's copies are slow, not the loader"),
                ("slow.offload-bound", "at its rated link the copies would be short"),
                ("link.nvlink-missing", "a PCIe link is below its rating"),
            ),
            formula=_formula(first),
        )
    ]


def _below(event: Event, name: str) -> bool:
    now, most = event.number(name), event.number(f"{name}_max")
    return now is not None and most is not None and 0 < now < most


def _worse_than_built(narrow: list[Event]) -> bool:
    """Whether a link that all GPUs share is at most a quarter: clouds do give half of the lanes."""
    return all((e.number("width") or 0) * 4 <= (e.number("width_max") or 0) for e in narrow)


def _once(events: list[Event]) -> list[Event]:
    """One reading a GPU."""
    return list({e.number("index"): e for e in reversed(events)}.values())[::-1]


def _formula(event: Event) -> str | None:
    gen, most = event.number("gen"), event.number("gen_max")
    width, widest = event.number("width"), event.number("width_max")
    if None in (gen, most, width, widest):
        return None
    now = LANE.get(int(gen or 0), 0.0) * (width or 0)
    rated = LANE.get(int(most or 0), 0.0) * (widest or 0)
    return f"Gen{gen:g} x{width:g} = {now:.3g} GB/s of Gen{most:g} x{widest:g} = {rated:.3g} GB/s"


def _ranks(evidence: Evidence, event: Event, gpus: list[int], count: int) -> tuple[int, ...]:
    """Ranks on those GPUs: by NCCL's lines, else by number where the job is that one host's."""
    known = {p.gpu: r for r, p in evidence.nccl.of_rank.items() if p.host == event.place}
    if known:
        return tuple(known[g] for g in gpus if g in known)
    alone = len(evidence.nccl.hosts) < 2 and evidence.world_size in (None, count)
    return tuple(gpus) if alone and count > 1 and evidence.lines.of("train.step") else ()


def loaded(event: Event, policy: Policy) -> bool:
    """Whether a reading of a GPU was taken under load."""
    if event.fields.get("idle") is True:
        return False
    used, power = event.number("utilization"), event.number("power")
    limit = event.number("power_limit")
    busy = used is not None and used >= policy.gpu_busy
    return busy or (power is not None and limit is not None and power >= policy.gpu_loaded * limit)


# --- what NCCL models -------------------------------------------------------------------------


def _edges(evidence: Evidence) -> list[tuple[Event, float, float]]:
    """(line, GB/s of the device's link, GB/s of the narrowest edge above it)."""
    out = []
    for event in evidence.lines.of("pcie.path"):
        own, path = event.number("own"), event.number("path")
        if own is not None and path is not None:
            out.append((event, own, path))
    above: dict[str, Event] = {}
    for event in evidence.lines.of("nccl-info.pcie"):
        speed = event.number("bandwidth")
        if speed is None:
            continue
        if event.text("what").startswith("PCI/"):
            above[event.place] = event
        elif (bridge := above.get(event.place)) is not None:
            out.append((bridge, speed, min(speed, bridge.number("bandwidth") or speed)))
    return out


def _modelled(evidence: Evidence, policy: Policy) -> list[Finding]:
    low = [e for e in _edges(evidence) if e[2] <= policy.modelled_edge * e[1]]
    if not low:
        return []
    event, own, path = low[0]
    measured = lowest(evidence)
    if measured is None or measured.rate >= min(o for _, o, _ in low):
        return []
    best = reached(evidence)
    cured = best is not None and best.rate >= policy.cured_rate * measured.rate
    after = f"; another run of the same test reaches {best.rate:g} GB/s" if best and cured else ""
    hosts = sorted({e.label for e, _, _ in low})
    return [
        root(
            "link.pcie-degraded",
            "certain" if cured else "likely",
            f"Bridges above {len(low)} devices of {', '.join(hosts[:3])} report {path:.3g} GB/s "
            f"while the devices behind them have {own:.3g} GB/s, so NCCL plans with too little; "
            f"{measured.rate:g} GB/s are reached{after}.",
            [event, measured.event, *([best.event] if best and cured else [])],
            where="virtual-topology",
            excluded=(
                ("link.nic-degraded", "the modelled PCIe edge, not a port, is slow"),
                ("link.internode-too-slow", "the rate reached is far below the NICs'"),
                ("link.nics-unused", "NCCL's model, not its list, keeps the NICs idle"),
                ("link.gdr-off", "the modelled PCIe edge limits the path"),
            ),
            formula=f"modelled {path:.3g} / device {own:.3g} GB/s, reached {measured.rate:g} GB/s",
        )
    ]
