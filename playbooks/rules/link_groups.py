"""Groups that a job prints, held against its hosts: link.axis-placement, tp-crosses-nodes.

In: lists of ranks by axis, where ranks lie, what the axis' communication costs. Out: at most one
root, of the heaviest axis whose groups leave their hosts although a host has room for them. A
group larger than a host crosses whatever one does; in a job whose steps are on record the cost has
to be as well.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from playbooks import costs, layouts
from playbooks.rules.naming import broke, progressed, root
from playbooks.words import label

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_CAUSES = {"tp": "link.tp-crosses-nodes", "cp": "link.axis-placement", "ep": "link.axis-placement"}


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The heaviest axis first."""
    if broke(evidence):
        return []
    listed = _listed(evidence)
    for axis in ("tp", "cp", "ep"):
        found = _axis(evidence, policy, axis, listed.get(axis, []))
        if found:
            return found
    return []


def _listed(evidence: Evidence) -> dict[str, list[Event]]:
    """Groups by axis: as printed, else of the coordinates that ranks print of themselves."""
    out: dict[str, list[Event]] = defaultdict(list)
    for event in evidence.lines.of("group.listed"):
        out[event.text("axis")].append(event)
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], dict[int, Event]] = defaultdict(dict)
    for event in evidence.lines.of("rank.place"):
        at, rank = event.fields.get("coordinates"), event.number("rank")
        if not isinstance(at, dict) or rank is None:
            continue
        for axis in at:
            others = tuple(sorted((a, n) for a, n in at.items() if a != axis))
            groups[axis, others][int(rank)] = event
    for (axis, _), members in sorted(groups.items()):
        if len(members) > 1 and axis not in out:
            ranks = sorted(members)
            hosts = [members[r].text("at") for r in ranks]
            fields = {"axis": axis, "ranks": ranks, "hosts": hosts}
            out[axis + " "].append(replace(members[ranks[0]], fields=fields))
    return {axis.strip(): events for axis, events in out.items()}


def _hosts(evidence: Evidence, event: Event, each: int | None) -> list[str] | None:
    told = event.fields.get("hosts")
    if isinstance(told, list):
        return [str(h) for h in told]
    ranks = event.fields.get("ranks")
    found = [layouts.node_of(evidence, int(r), each) for r in ranks] if ranks else []
    return [h for h in found if h is not None] if found and None not in found else None


def _axis(evidence: Evidence, policy: Policy, axis: str, groups: list[Event]) -> list[Finding]:
    each = layouts.gpus_a_host(evidence)
    crossing: list[tuple[Event, list[str]]] = []
    for event in groups:
        hosts = _hosts(evidence, event, each)
        if hosts and len(set(hosts)) > 1:
            crossing.append((event, hosts))
    if not crossing:
        return []
    event, hosts = crossing[0]
    ranks = [int(r) for r in event.fields["ranks"]]
    spread = max(hosts.count(h) for h in hosts)
    # Several hosts hold more of the job than this group: one of them has room for all of it.
    room = each or len(ranks)
    if len(ranks) > room or (axis != "tp" and spread == len(ranks)):
        return []
    share = costs.share(evidence, costs.WORDS[axis])
    rate = costs.rate(evidence, costs.WORDS[axis])
    if progressed(evidence) and not share:
        return []
    if share is not None and share.value < policy.axis_cost:
        return []
    group = label(axis, ranks)
    places = ", ".join(f"{hosts.count(h)} on {h}" for h in dict.fromkeys(hosts))
    cost = f"; it takes {share.value:.0%} of the step" if share else ""
    slow = f" at {rate.value:.3g} GB/s" if rate and share else ""
    told = [x.event for x in (share, rate) if x is not None]
    return [
        root(
            _CAUSES[axis],
            "likely",
            f"{len(crossing)} of {len(groups)} printed {axis} groups leave their hosts: {group} "
            f"has {places}, although {len(ranks)} ranks fit on one host of {room}{cost}{slow}.",
            [event, *told, *(e for e, _ in crossing[1:2])],
            where={"ep": "ep-across-nodes", "cp": "cp-across-nodes"}.get(axis),
            excluded=(
                ("link.internode-too-slow", "another mapping takes these bytes off the network"),
                ("slow.expert-imbalance", "the placement, not the load, is uneven"),
                ("slow.comm-exposed", "the groups' placement makes it slow"),
            ),
            formula=f"hosts of {group}: {len(set(hosts))} > 1, size {len(ranks)} <= {room}",
        ).but(axis=axis, group=group)
    ]
