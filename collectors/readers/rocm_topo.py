"""`rocm-smi --showtopo`: matrices of weight, hops and link type between AMD GPUs, NUMA nodes.

In: text. Out: a Topology: XGMI as kind "xgmi", PCIE as "host-bridge" of one NUMA node or "socket"
across. Weights and hops are no use to anybody here. The host comes from the file's name.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import PurePath
from typing import TYPE_CHECKING

from collectors.collected import Reading, Source
from collectors.topology.graph import Gpu, Link, Topology

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact

KIND = "rocm-smi-topology"
_GPUS = 256
_LINES = 20_000
_TITLE = re.compile(r"^=+ ?([A-Za-z][\w ]+?) ?=+$")
_ROW = re.compile(r"^GPU(\d{1,3})\s+(.*\S)\s*$")
_NODE = re.compile(r"^GPU\[(\d{1,3})\].*Numa Node:\s*(\d{1,4})")


def sniff(head: bytes) -> bool:
    """The titles of that output."""
    return (
        b"between two GPUs" in head
        and re.search(rb"Link Type between|Hops between", head) is not None
    )


def read(artifact: Artifact) -> Reading:
    """One Topology, or a Source that says what is missing."""
    problems: list[str] = []
    title = ""
    rows: dict[int, tuple[list[str], int]] = {}
    nodes: dict[int, int] = {}
    for number, text in artifact.lines(problems):
        if number > _LINES:
            problems.append(f"read up to line {_LINES}")
            break
        found = _TITLE.match(text.strip())
        if found:
            title = found[1].lower()
            continue
        row = _ROW.match(text) if title.startswith("link type") else None
        if row and int(row[1]) < _GPUS:
            rows[int(row[1])] = (row[2].split(), number)
        node = _NODE.match(text)
        if node:
            nodes[int(node[1])] = int(node[2])
    if not rows:
        return Reading(Source(artifact.path, KIND, "none", ("no matrix of link types in it",)))
    links, places = [], {}
    for a, b in combinations(sorted(rows), 2):
        cells, line = rows[a]
        word = cells[b] if b < len(cells) else ""
        far = "socket" if nodes.get(a) != nodes.get(b) else "host-bridge"
        kind = {"XGMI": "xgmi", "PCIE": far}.get(word.upper(), "unknown")
        links.append(Link(f"GPU{a}", f"GPU{b}", kind))
        places[f"GPU{a}", f"GPU{b}"] = f"line {line}"
    host = re.split(r"[._]", PurePath(artifact.path).name)[0]
    reading = Reading(Source(artifact.path, KIND, "part" if problems else "all", tuple(problems)))
    gpus = tuple(Gpu(f"GPU{i}", i, numa=nodes.get(i)) for i in sorted(rows))
    reading.topologies.append(Topology(host, gpus, (), tuple(links), artifact.path, places))
    return reading
