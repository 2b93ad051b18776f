"""NVLinks that are down: link.nvlink-degraded from `nvidia-smi nvlink -s`.

In: the state of every link of every GPU. Out: one root naming GPUs with fewer (or slower) active
links than most others of their host. Equal GPUs say nothing, however few links they have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """GPUs below their equals."""
    hosts: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in evidence.lines.of("nvlink.link"):
        gpu = event.number("gpu")
        if gpu is not None:
            hosts[event.place][int(gpu)].append(event)
    out = []
    for gpus in hosts.values():
        speed = {g: sum(e.number("speed") or 0.0 for e in links) for g, links in gpus.items()}
        usual, equals = Counter(speed.values()).most_common(1)[0]
        low = {g: s for g, s in speed.items() if s < usual}
        if not low or equals < policy.equal_gpus or 2 * equals <= len(speed):
            continue
        bad = [e for g in low for e in gpus[g] if not e.number("speed")]
        names = ", ".join(f"GPU {g}" for g in sorted(low))
        out.append(
            root(
                "link.nvlink-degraded",
                "likely",
                f"{names} on {next(iter(gpus.values()))[0].label}: "
                f"{count(len(bad), 'NVLink')} inactive, {sum(low.values()):g} of "
                f"{usual * len(low):g} GB/s that {equals} other GPUs have each.",
                bad or [gpus[g][0] for g in low],
                excluded=(
                    ("link.nvlink-missing", "the GPU has links, some of them down"),
                    ("slow.straggler-compute", "the path, not the compute, is below its peers'"),
                ),
            )
        )
    return out
