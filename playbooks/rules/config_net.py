"""Which address and port processes use: config.socket-interface, port-blocked, rendezvous.

In: interfaces that NCCL chose, connections that failed, what the store and the launcher say. Out:
roots. The address that was refused decides: one that no peer can have (loopback, a bridge of
containers) is the interface; the peer's own, while the store was reached, is a firewall.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from playbooks.lines import items
from playbooks.rules.naming import broke, progressed, root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_VIRTUAL = re.compile(
    r"^(?:lo\d*|docker\d*|veth\w*|virbr\d*|br-[0-9a-f]+|cni\d*|flannel\S*|cali\w+|tun\d*|tap\d*|"
    r"vmnet\d*|podman\d*|lxcbr\d*|lxdbr\d*|tailscale\d*|wg\d*|zt\w+)$"
)
_REJECTED = (
    "No route to host",
    "Connection timed out",
    "Host is unreachable",
    "Operation timed out",
)


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """At most one root: the earliest place at which processes fail to meet."""
    del policy
    if progressed(evidence):
        return []
    taken = _taken(evidence)
    if taken or not broke(evidence):
        return taken
    return _interface(evidence) or _blocked(evidence) or _rendezvous(evidence)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.strip("[]").split("%")[0])
    except ValueError:
        return None
    return found


def _useless(text: str) -> bool:
    """Whether no other host can reach that address."""
    found = _address(text)
    return found is not None and (found.is_loopback or (found.is_link_local and found.version == 4))


def _names(evidence: Evidence) -> list[Event]:
    """Lines that name an interface which leads to no other host."""
    out = [
        e
        for e in evidence.lines.of("nccl-info.bootstrap")
        if _VIRTUAL.match(e.text("interface")) or _useless(e.text("address"))
    ]
    for event in evidence.lines.of("nccl-info.socket"):
        listed = event.fields.get("interfaces")
        names = [str(i.get("name")) for i in listed] if isinstance(listed, list) else []
        if names and all(_VIRTUAL.match(n) for n in names):
            out.append(event)
    return out


def _several(evidence: Evidence) -> bool:
    hosts = {e.place for e in evidence.lines.of("nccl-info.bootstrap")}
    return evidence.nccl.several_hosts or len(hosts) > 1 or _nnodes(evidence) > 1


def _nnodes(evidence: Evidence) -> int:
    values = [
        e.text("value")
        for e in evidence.lines.of("launch.option")
        if e.text("name") in ("nodes", "nnodes")
    ]
    return max((int(v[:6]) for v in values if v.isdecimal()), default=0)


def _interface(evidence: Evidence) -> list[Finding]:
    lines = evidence.lines
    none = lines.of("nccl.no-interface", "gloo.no-interface")
    refused = lines.of("nccl.connect-failed", "gloo.connect-failed")
    looped = [e for e in refused if _useless(e.text("peer"))]
    chosen = _names(evidence)
    told = [e for n in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") for e in
            evidence.nccl.env.get(n, {}).values()]  # fmt: skip
    if none:
        name = none[0].text("name") or "any interface it may use"
        return [_finding("unknown-name", f"{none[0].kind.split('.')[0]} does not find {name}.",
                         [*none[:2], *told[:1]], "certain")]  # fmt: skip
    if not _several(evidence) or evidence.nccl.started:
        return []
    if not chosen and not looped:
        return []
    first = chosen[0] if chosen else looped[0]
    what = first.text("interface") or first.text("peer") or "a virtual interface"
    loop = what.startswith("lo") or _useless(first.text("address") or first.text("peer"))
    sure: Confidence = "certain" if chosen and refused else "likely"
    where = "loopback" if loop else "virtual"
    summary = (
        f"NCCL bootstraps over {what}, which leads to no other host, in a job of several hosts."
        if chosen
        else f"A process offers {what} as its address to ranks of other hosts."
    )
    return [_finding(where, summary, [*chosen[:2], *looped[:1], *told[:1], *refused[:1]], sure)]


def _finding(where: str, summary: str, events: list[Event], sure: Confidence) -> Finding:
    return root(
        "config.socket-interface",
        sure,
        summary,
        events,
        where=where,
        excluded=(
            ("config.port-blocked", "the address offered to the peers is not theirs to reach"),
            ("config.rendezvous", "the store works"),
            ("hang.rank-died", "it fails in init, before any rank ended"),
            ("hang.rank-stalled", "it fails in init"),
            ("crash.user-exception", "the network fails, not the program's code"),
            ("link.socket-fallback", "the question is which interface, not whether RDMA is used"),
        ),
    )


def _blocked(evidence: Evidence) -> list[Finding]:
    refused = evidence.lines.of("nccl.connect-failed", "gloo.connect-failed")
    dropped = [
        e for e in refused if e.text("why") in _REJECTED and not _useless(e.text("peer") or "x")
    ]
    if not dropped or _ended_before(evidence, dropped):
        return []
    own = {e.text("address").split("<")[0]: e for e in evidence.lines.of("nccl-info.bootstrap")}
    known = [e for e in dropped if e.text("peer") in own]
    one = (known or dropped)[0]
    peer = one.text("peer") or "its peer"
    sure: Confidence = "certain" if known and _met(evidence) else "likely"
    if not known and one.text("why") != "No route to host" and not _met(evidence):
        sure = "possible"
    port = one.number("port")
    at = f"{peer} port {int(port)}" if port is not None else peer
    shown = items([own[one.text("peer")]], 1) if known else ()
    return [
        root(
            "config.port-blocked",
            sure,
            f'Connections to {at} fail with "{one.text("why")}" although the ranks met in the '
            "store: something between the hosts blocks that port.",
            [one, *dropped[:2]],
            more=shown,
            excluded=(
                ("config.socket-interface", f"{peer} is the address that the peer offers"),
                ("config.rendezvous", "the rendezvous succeeded"),
                ("hang.rank-died", "nothing ended before the connection failed"),
                ("hang.slow-not-dead", "the connection fails, nobody is late"),
                ("hang.rank-stalled", "it fails in init"),
                ("crash.user-exception", "the network fails, not the program's code"),
            ),
        )
    ]


def _met(evidence: Evidence) -> bool:
    """Whether ranks of both sides passed the store: NCCL began its bootstrap on more than one."""
    return len(evidence.nccl.hosts) > 1 or bool(evidence.lines.of("nccl-info.comm"))


def _ended_before(evidence: Evidence, dropped: list[Event]) -> bool:
    """Whether a process is known to have ended before the first connection failed."""
    times = [e.at_ns for e in dropped if e.at_ns is not None]
    if not times:
        return False
    return any(e.at_ns is not None and e.at_ns < min(times) for e in evidence.ends)


def _taken(evidence: Evidence) -> list[Finding]:
    """A port that somebody listens on already, where the store (or its launcher) gave up on it."""
    used = evidence.lines.of("store.address-in-use")
    gave_up = [
        e
        for e in evidence.lines.of("python.exception")
        if e.fields.get("uncaught") is not False
        and re.search(r"EADDRINUSE|ddress already in use", e.text("message"))
    ]
    if not gave_up:
        return []
    return [
        _meeting("port-in-use", "The port of the rendezvous is taken on its host.", used + gave_up)
    ]


def _rendezvous(evidence: Evidence) -> list[Finding]:
    lines = evidence.lines
    failed = lines.of(
        "store.connect-timeout", "store.clients-missing", "elastic.rendezvous", "store.retry"
    )
    if not failed:
        return []
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        by_place = evidence.nccl.env.get(name, {})
        values = {e.text("value") for e in by_place.values()}
        if len(values) > 1:
            shown = " and ".join(sorted(values)[:3])
            return [
                _meeting(
                    "endpoint-differs",
                    f"{name} differs between nodes: {shown}.",
                    [*by_place.values(), *failed[:1]],
                )
            ]
    looped = [e for e in failed if _useless(e.text("host")) or e.text("host") == "localhost"]
    if looped and _nnodes(evidence) > 1:
        return [
            _meeting(
                "name-resolution",
                f"A node looks for the store at {looped[0].text('host')}, itself, in a job of "
                f"{_nnodes(evidence)} nodes.",
                looped,
            )
        ]
    return []


def _meeting(where: str, summary: str, events: list[Event]) -> Finding:
    return root(
        "config.rendezvous",
        "likely",
        summary,
        events,
        where=where,
        excluded=(
            ("config.port-blocked", "the address itself is wrong or taken"),
            ("hang.rank-died", "the ranks never met"),
            ("crash.user-exception", "the rendezvous fails, not the program's code"),
        ),
    )
