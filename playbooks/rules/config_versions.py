"""Hosts that run different NCCLs or NCCL settings: config.nccl-mismatch.

In: versions that banners and errors state, wording by host, variables by host, sizes that differ on
the wire. Out: at most one root, in a job that failed. What rank 0 prints is not taken for all.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from playbooks.rules.naming import broke, progressed, root

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Confidence, Finding
    from playbooks.lines import Event
    from playbooks.policy import Policy

_WIRE = {
    "NCCL_PROTO",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CHUNK_SIZE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NTHREADS",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_IB_DISABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_NET_SHARED_BUFFERS",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_IB_MERGE_NICS",
}
"""Variables that both ends of a connection have to agree on."""


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Versions first, then settings."""
    del policy
    if not broke(evidence) or progressed(evidence):
        return []
    return _versions(evidence) or _settings(evidence)


def _excluded(fact: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (cause, fact)
        for cause in (
            "hang.collective-mismatch",
            "hang.transport",
            "hang.rank-died",
            "config.port-blocked",
            "config.unsupported-arch",
            "crash.user-exception",
            "crash.native-fault",
            "link.nic-degraded",
        )
    )


def _versions(evidence: Evidence) -> list[Finding]:
    lines = evidence.lines
    by_place: dict[str, dict[str, Event]] = defaultdict(dict)
    for event in lines.of("nccl-info.version"):
        by_place[event.place].setdefault(event.text("version"), event)
    said = lines.of("nccl.version-mismatch")
    truncated = lines.of("nccl.truncated")
    single = {p: v for p, v in by_place.items() if len(v) == 1}
    versions = {next(iter(v)) for v in single.values()}
    if not said and len(versions) < 2:
        return []
    shown = ", ".join(f"{p} {next(iter(v))}" for p, v in sorted(single.items())[:4])
    events = [*said[:2], *(e for v in single.values() for e in v.values()), *truncated[:1]]
    sure: Confidence = "certain" if said or truncated else "likely"
    return [
        root(
            "config.nccl-mismatch",
            sure,
            f"Hosts run different NCCL versions ({shown or 'as NCCL itself says'}).",
            events,
            where="version",
            excluded=_excluded("the versions of the hosts differ on record"),
        )
    ]


def _settings(evidence: Evidence) -> list[Finding]:
    wire = evidence.lines.of("nccl.size-mismatch", "nccl.truncated")
    hosts = set(evidence.nccl.hosts)
    differing: list[tuple[str, dict[str, Event]]] = []
    for name, by_place in sorted(evidence.nccl.env.items()):
        if name not in _WIRE:
            continue
        told = {p: e for p, e in by_place.items() if p in hosts}
        values = {e.text("value") for e in told.values()}
        absent = hosts - set(told) if len(hosts) > 1 else set()
        if told and (len(values) > 1 or absent):
            differing.append((name, told))
    if not differing or not (wire or evidence.lines.of("nccl.error", "nccl.timeout")):
        return []
    name, told = differing[0]
    shown = ", ".join(f"{p}: {e.text('value')}" for p, e in sorted(told.items())[:4])
    return [
        root(
            "config.nccl-mismatch",
            "likely" if wire else "possible",
            f"{name} is not the same on all hosts ({shown}).",
            [*told.values(), *wire[:2]],
            where="settings",
            excluded=_excluded(f"{name} differs between the hosts on record") if wire else (),
        )
    ]
