"""Which GPU each rank uses: config.duplicate-gpu, config.too-many-ranks, config.mig.

In: NCCL's complaint that two ranks share a device, "invalid device ordinal", what ranks and GPUs a
host has. Out: at most one root. The count of ranks against the count of GPUs decides between a
program that picks the wrong device and a launcher that started too many; MIG comes before both.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from playbooks.rules.naming import broke, root
from playbooks.words import ranks_words

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The reason why two ranks met on one GPU, or why a rank found none."""
    del policy
    shared = evidence.lines.of("nccl.duplicate-gpu")
    ordinal = evidence.lines.of("cuda.invalid-ordinal")
    if not (shared or ordinal) or not broke(evidence):
        return []
    mig = _mig(evidence)
    if mig:
        return [
            root(
                "config.mig",
                "likely",
                "Several ranks run on MIG slices, and CUDA or NCCL refuses the devices they name.",
                [*mig[:2], *(shared or ordinal)[:2]],
                excluded=(
                    ("config.duplicate-gpu", "MIG is enabled"),
                    ("config.too-many-ranks", "the devices are MIG slices"),
                    ("crash.user-exception", "the device is refused, not the program's code"),
                    ("hang.device-error", "no GPU was lost"),
                ),
            )
        ]
    local, source = _local_ranks(evidence)
    visible, seen = _visible(evidence)
    if local is not None and visible is not None:
        found = _counted(evidence, local, visible, shared, ordinal)
        return [found.but(evidence=(*found.evidence, *(e.item for e in (source, seen) if e)))]
    if not shared:
        return []
    pair = _sharing(evidence)
    return [
        root(
            "config.duplicate-gpu",
            "possible",
            f"{ranks_words(pair, capital=True) if pair else 'Two ranks of a host'} use the same "
            "GPU; how many GPUs the host shows to them is not on record.",
            shared,
            ranks=pair,
        )
    ]


def _mig(evidence: Evidence) -> list[Event]:
    enabled = [
        e
        for e in evidence.lines.of("gpu.sample")
        if e.text("mig").lower() == "enabled" or " MIG " in e.text("name")
    ]
    return [*evidence.lines.of("gpu.mig"), *enabled]


def _local_ranks(evidence: Evidence) -> tuple[int | None, Event | None]:
    """Most ranks of one host, and the line that says so."""
    best: tuple[int | None, Event | None] = (None, None)
    hosts: dict[tuple[str, str | None], set[int]] = defaultdict(set)
    for process in evidence.nccl.processes:
        if process.rank is not None:
            hosts[process.host, process.comm_id].add(process.rank)
    if hosts:
        best = (max(len(r) for r in hosts.values()), None)
    named = {
        n
        for e in evidence.lines.of("nccl.duplicate-gpu")
        for n in (e.number("one"), e.number("other"))
        if n is not None
    }
    if named and (best[0] or 0) < len(named):
        best = (len(named), None)
    for event in evidence.lines.of("launch.option"):
        value = event.text("value")
        if event.text("name") in ("nproc-per-node", "ntasks-per-node") and value.isdecimal():
            told = int(value[:6])
            if best[0] is None or told > best[0]:
                best = (told, event)
    locals_ = [
        int(n)
        for e in evidence.lines.of("elastic.failure")
        if (n := e.number("local_rank")) is not None
    ]
    if locals_ and (best[0] is None or max(locals_) + 1 > best[0]):
        best = (max(locals_) + 1, None)
    return best


def _visible(evidence: Evidence) -> tuple[int | None, Event | None]:
    """GPUs that a host shows to its ranks, and the line that says so."""
    masks = [
        e
        for e in evidence.lines.of("launch.env")
        if e.text("name") == "CUDA_VISIBLE_DEVICES" and e.text("value")[:1].isdecimal()
    ]
    told = {len(e.text("value").split(",")): e for e in masks}
    if len(told) == 1 and 1 not in told:
        return next(iter(told.items()))
    per_host: dict[str, dict[int, Event]] = defaultdict(dict)
    for event in evidence.lines.of("gpu.sample", "gpu.listed"):
        index = event.number("index")
        if index is not None:
            per_host[event.place][int(index)] = event
    if per_host:
        host = min(per_host, key=lambda h: (len(per_host[h]), h))
        return len(per_host[host]), per_host[host][max(per_host[host])]
    if evidence.collected.topologies:
        return min(len(t.gpus) for t in evidence.collected.topologies), None
    used = [p.cuda_dev for p in evidence.nccl.processes if p.cuda_dev is not None]
    buses = {(p.host, p.bus_id) for p in evidence.nccl.processes if p.bus_id}
    local = _local_ranks(evidence)[0]
    if used and local is not None and max(used) + 1 >= local and len(buses) > 1:
        return max(used) + 1, None  # the highest device number shows that there are as many
    return None, None


def _sharing(evidence: Evidence) -> tuple[int, ...]:
    """Ranks of the largest communicator that lie on one device of one host."""
    devices: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, process in evidence.nccl.of_rank.items():
        if process.bus_id:
            devices[process.host, process.bus_id].append(rank)
    together = {r for ranks in devices.values() if len(ranks) > 1 for r in ranks}
    named = {
        int(n)
        for e in evidence.lines.of("nccl.duplicate-gpu")
        for n in (e.number("one"), e.number("other"))
        if n is not None
    }
    return tuple(sorted(together or named))


def _counted(
    evidence: Evidence, local: int, visible: int, shared: list[Event], ordinal: list[Event]
) -> Finding:
    formula = f"ranks of a host {local}, GPUs that it shows {visible}"
    if local > visible:
        return root(
            "config.too-many-ranks",
            "certain" if shared else "likely",
            f"{local} ranks were started on a host that shows {visible} GPUs to them.",
            shared or ordinal,
            excluded=(
                ("config.duplicate-gpu", f"{visible} GPUs are too few for {local} ranks"),
                ("crash.user-exception", "the device that is refused does not exist"),
                ("hang.device-error", "no GPU was lost; it was never visible"),
            ),
            formula=formula,
        )
    if not shared:
        return root(
            "config.duplicate-gpu",
            "possible",
            f"A rank asked for a device that does not exist, although {visible} GPUs are enough "
            f"for {local} ranks.",
            ordinal,
            formula=formula,
        )
    pair = _sharing(evidence)
    who = ranks_words(pair, capital=True) if pair else "Two ranks"
    return root(
        "config.duplicate-gpu",
        "certain",
        f"{who} of one host use the same GPU, although it has {visible} for {local} ranks.",
        shared,
        ranks=pair,
        excluded=(
            ("config.too-many-ranks", f"{visible} GPUs are enough for {local} ranks"),
            ("config.mig", "no MIG device is on record"),
            ("crash.user-exception", "NCCL refuses the devices, not the program's code"),
        ),
        formula=formula,
    )
