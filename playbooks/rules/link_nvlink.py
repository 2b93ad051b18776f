"""NVLinks that are down: link.nvlink-degraded from `nvidia-smi nvlink -s`.

In: the state of every link of every GPU. Out: one root naming GPUs with fewer (or slower) active
links than most others of their host. Where no most can be told, a GPU
that prints links as inactive is below its model.
"""

from __future__ import annotations

import re
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
            out += _below_norm(gpus)
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


def _below_norm(gpus: dict[int, list[Event]]) -> list[Finding]:
    """GPUs that print links as inactive although their model has all of them."""
    bad: list[Event] = []
    for links in gpus.values():
        norm = next((n for p, n in LINKS if p.search(links[0].text("name"))), None)
        up = [e for e in links if e.number("speed")]
        if norm is not None and len(links) >= norm and 0 < len(up) < norm:
            bad += [e for e in links if not e.number("speed")]
    if not bad:
        return []
    names = ", ".join(f"GPU {g}" for g in sorted({int(e.number("gpu") or 0) for e in bad}))
    return [
        root(
            "link.nvlink-degraded",
            "likely",
            f"{names} on {bad[0].label}: {count(len(bad), 'NVLink')} of a "
            f"{bad[0].text('name')} {'is' if len(bad) == 1 else 'are'} inactive.",
            bad,
            excluded=(
                ("link.nvlink-missing", "the GPU has links, some of them down"),
                ("slow.straggler-compute", "the path, not the compute, is below its model's"),
            ),
        )
    ]


LINKS = (
    (re.compile(r"\bG?B[23]00\b|\bH[12]00\b(?!.*(?:PCIe|NVL))"), 18),
    (re.compile(r"\bA100-SXM"), 12),
    (re.compile(r"\bV100-SXM"), 6),
)
"""NVLinks of a GPU by model (`nvidia-smi nvlink -s` prints as many lines)."""
