"""A node's GPUs, NICs and the links between them, whatever file or tool said so.

In: what the readers of topology files found. Out: one frozen graph a node that checks, drawing and
placement read. It never guesses: a pair that no source describes has no link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = {
    "nvlink": 0,
    "xgmi": 0,
    "pcie-switch": 1,
    "pcie-switches": 2,
    "host-bridge": 3,
    "node": 4,
    "socket": 5,
    "network": 6,
    "unknown": 7,
}
"""Kinds of link from near to far: NV# (AMD: XGMI), PIX, PXB, PHB, NODE and SYS of `topo -m`."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as its host numbers it."""

    name: str
    index: int
    model: str | None = None
    numa: int | None = None
    cpu_affinity: str | None = None


@dataclass(frozen=True)
class Nic:
    """One network interface card."""

    name: str
    device: str | None = None
    rate: float | None = None
    """Bytes a second, one direction."""
    state: str | None = None


@dataclass(frozen=True)
class Link:
    """A path between two ends, as the nearest common element names it. Undirected."""

    a: str
    b: str
    kind: str
    count: int | None = None
    """Parallel links, for NVLink."""
    bandwidth: float | None = None
    """Bytes a second, one direction, all parallel links together; None when unknown."""


@dataclass(frozen=True)
class Topology:
    """One node."""

    host: str
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    links: tuple[Link, ...]
    source: str
    locators: dict[tuple[str, str], str] = field(default_factory=dict, hash=False)
    """(a, b) -> place in `source`, for evidence."""
    modelled: bool = False
    """As NCCL models the node, which may be wrong; a matrix of the driver stands above it."""

    def link(self, a: str, b: str) -> Link | None:
        """The link between two ends in either direction."""
        for one in self.links:
            if {one.a, one.b} == {a, b}:
                return one
        return None
