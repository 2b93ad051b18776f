"""A node's links for a terminal: one matrix of GPUs, one of NICs against GPUs.

In: a Topology. Out: lines of at most 100 columns. The words are nvidia-smi's (NV18, PIX, SYS),
since that is what people compare with; a pair that no source describes is a dot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from collectors.topology.graph import Link, Topology

_SHORT = {
    "xgmi": "XGMI",
    "pcie-switch": "PIX",
    "pcie-switches": "PXB",
    "host-bridge": "PHB",
    "node": "NODE",
    "socket": "SYS",
    "network": "NET",
    "unknown": "?",
}
_COLUMNS = 16
_WIDTH = 5


def short(link: Link | None) -> str:
    """The cell that nvidia-smi prints for a link."""
    if link is None:
        return "."
    if link.kind == "nvlink":
        return f"NV{link.count}" if link.count is not None else "NV"
    return _SHORT.get(link.kind, "?")


def _matrix(topology: Topology, rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    table = {frozenset((x.a, x.b)): x for x in topology.links}
    left = max(len(r) for r in rows) + 2
    lines = []
    for start in range(0, len(columns), _COLUMNS):
        some = columns[start : start + _COLUMNS]
        lines.append(" " * left + "".join(c.replace("GPU", "G").ljust(_WIDTH) for c in some))
        for row in rows:
            cells = ("x" if c == row else short(table.get(frozenset((row, c)))) for c in some)
            lines.append(row.ljust(left) + "".join(c.ljust(_WIDTH) for c in cells))
    return [line.rstrip() for line in lines]


def draw(topology: Topology) -> list[str]:
    """The node as lines of text."""
    gpus = [g.name for g in topology.gpus]
    nics = [n.name for n in topology.nics]
    what = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"
    if nics:
        what += f", {len(nics)} NIC{'s' if len(nics) != 1 else ''}"
    lines = [f"{topology.host}: {what}"]
    if gpus:
        lines += _matrix(topology, gpus, gpus)
    if gpus and nics:
        names = {n.name: n.device for n in topology.nics}
        shown = [n if names[n] in (None, n) else f"{n} {names[n]}" for n in nics]
        rows = _matrix(topology, nics, gpus)
        wide = max(len(s) for s in shown) + 2
        old = max(len(n) for n in nics) + 2
        label = dict(zip(nics, shown, strict=True))
        lines.append("")
        for row in rows:
            name = row[:old].strip()
            lines.append((label.get(name, name).ljust(wide) + row[old:]).rstrip())
    return lines
