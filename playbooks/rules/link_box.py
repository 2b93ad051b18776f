"""One node's own NVLinks: link.nvlink-degraded, and what only some pairs have.

In: a Topology. Out: findings on GPUs with fewer NVLinks than their equals have among themselves,
and as context that NVLink joins some pairs of a node and not others.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from collectors.topology.draw import short
from playbooks.finding import Finding, Item

if TYPE_CHECKING:
    from collectors.topology.graph import Link, Topology
    from playbooks.finding import Confidence
    from playbooks.policy import Policy


def link_item(topology: Topology, link: Link) -> Item:
    """A link with its place in the table."""
    place = topology.locators.get((link.a, link.b)) or topology.locators.get((link.b, link.a))
    return Item(topology.source, place or "matrix", f"{link.a} and {link.b}: {short(link)}")


def partial(topology: Topology, policy: Policy) -> list[Finding]:
    """Without a plan it is context only that NVLink joins some pairs of a node and not others."""
    pairs = [x for x in topology.links if x.a.startswith("GPU") and x.b.startswith("GPU")]
    joined = [x for x in pairs if x.kind == "nvlink"]
    apart = [x for x in pairs if x.kind not in ("nvlink", "unknown")]
    if not joined or not apart or odd_gpus(topology, policy):
        return []
    return [
        Finding(
            cause="link.nvlink-missing",
            role="context",
            confidence="possible",
            summary=(
                f"on {topology.host} NVLink joins {len(joined)} of {len(pairs)} pairs of GPUs; "
                "keep tp inside those"
            ),
            evidence=(link_item(topology, joined[0]), link_item(topology, apart[0])),
        )
    ]


def odd_gpus(topology: Topology, policy: Policy) -> list[tuple[str, int, int]]:
    """(GPU, its most links to any peer, links among the others) of GPUs below their equals.

    Equals are the largest set of GPUs that are all joined by the same number of NVLinks; they have
    to be a majority. A cube mesh or bridged pairs have no such set and yield nothing.
    """
    counts = {
        frozenset((x.a, x.b)): (x.count or 0) if x.kind == "nvlink" else 0 for x in topology.links
    }
    gpus = [g.name for g in topology.gpus]
    usual = max(counts.values(), default=0)
    if not usual:
        return []
    degree = {
        g: sum(counts.get(frozenset((g, h)), 0) == usual for h in gpus if h != g) for g in gpus
    }
    equals = [g for g in gpus if degree[g] == max(degree.values())]
    whole = all(counts.get(frozenset(p), 0) == usual for p in combinations(equals, 2))
    if not whole or len(equals) < policy.equal_gpus or 2 * len(equals) <= len(gpus):
        return []
    out = []
    for gpu in gpus:
        pairs = [counts[p] for h in equals if (p := frozenset((gpu, h))) in counts]
        if gpu not in equals and pairs and max(pairs) < usual:
            out.append((gpu, max(pairs), usual))
    return out


def degraded(topology: Topology, policy: Policy) -> list[Finding]:
    """GPUs that lost links."""
    odd = odd_gpus(topology, policy)
    if not odd:
        return []
    names = ", ".join(f"{gpu} ({most})" for gpu, most, _ in odd)
    usual = odd[0][2]
    first = odd[0][0]
    link = next(x for x in topology.links if first in (x.a, x.b) and "GPU" in x.a and "GPU" in x.b)
    fine = next(x for x in topology.links if x.kind == "nvlink" and x.count == usual)
    sure: Confidence = "certain" if all(most > 0 for _, most, _ in odd) else "likely"
    return [
        Finding(
            cause="link.nvlink-degraded",
            role="root",
            confidence=sure,
            summary=(
                f"on {topology.host} {names} ha{'s' if len(odd) == 1 else 've'} fewer NVLinks "
                f"to every peer than the {usual} that all other GPUs have among themselves"
            ),
            evidence=(link_item(topology, link), link_item(topology, fine)),
            formula=f"NVLinks of {first} to a peer: {odd[0][1]} < {usual}",
        )
    ]
