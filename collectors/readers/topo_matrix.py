"""`nvidia-smi topo -m` of every era: one matrix or those of several nodes in one text.

In: text with tabs or spaces, glued or missing cells, ANSI in the header, missing affinity columns,
NIC names or a NIC legend. Out: a Topology a node, and rows of `links`. The host comes from what
precedes the matrix (a comment, a prompt, a prefix on each line), else from the file's name.
A cell that is not there gives no link; a kind that is not known here is "unknown", not a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from collectors.collected import Reading, Source
from collectors.readers.quote import bare, clean
from collectors.topology.graph import Gpu, Link, Nic, Topology

if TYPE_CHECKING:
    from collectors.readers.artifact import Artifact

KIND = "nvidia-smi-topo"
_MATRICES = 4096
_LINE = 4096
"""Characters of a line that are looked at; patterns cost up to the square of it."""
_WORDS = {
    "PIX": "pcie-switch",
    "PXB": "pcie-switches",
    "PHB": "host-bridge",
    "NODE": "node",
    "SYS": "socket",
    "SOC": "socket",  # drivers before R390
    "PSB": "pcie-switch",  # two GPUs of one board
    "N/A": "unknown",
}
_CELL = re.compile(r"\s*(NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC|PSB|X|N/A|[A-Z]{2,4}\d{0,2}(?=\s|$))")
_NAME = re.compile(r"GPU\d+|NIC\d+|[A-Za-z][\w.-]*\d[\w.:-]*")
_GPU = re.compile(r"GPU(\d+)")
_AFFINITY = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID")
_LEGEND = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)\s*$")
_PROMPT = re.compile(r"(?:[\w.-]+@)?([A-Za-z][\w.-]*)[^$#>]*[$#>]\s*nvidia-smi\s+topo")
_COMMENT = re.compile(
    r"^\s*(?:#+|=+|-+|>+|\*+)\s*(?:host|node|hostname)?\s*[:=]?\s*([A-Za-z][\w.-]*)\s*[:=#*-]*\s*$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"^\s*(?:host|hostname|node)\s*[:=]\s*([A-Za-z0-9][\w.-]*)\s*$", re.IGNORECASE)
_PREFIX = re.compile(r"^([A-Za-z][\w.-]*):(?=[ \t])[ ]?")
_NAMING = 200
"""Characters within which a line names a host."""
_FEW = 0.3
"""Less of a text than this in matrices: it is a log that shows one."""


@dataclass
class _Matrix:
    """One matrix while it is read."""

    host: str | None
    columns: list[str]
    rows: dict[str, list[str]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    tails: dict[str, list[str]] = field(default_factory=dict)
    legend: dict[str, str] = field(default_factory=dict)
    at: int = 0


def _header(line: str) -> list[str] | None:
    """Column names when `line` heads a matrix."""
    text = _AFFINITY.split(line, maxsplit=1)[0]
    first = text.lstrip()
    if not first.startswith("GPU0"):
        return None
    names = re.findall(r"GPU\d+", first) if re.search(r"GPU\d+GPU\d+", first) else []
    rest = _NAME.findall(first)
    names = names + [n for n in rest if not n.startswith("GPU")] if names else rest
    cells = [w for w in first.split()[1:] if w == "X" or w in _WORDS or re.fullmatch(r"NV\d+", w)]
    if cells or (len(names) < 2 and not _AFFINITY.search(line)):
        return None
    return list(dict.fromkeys(names))


def _row(line: str, matrix: _Matrix | None) -> tuple[str, list[str], str] | None:
    """(name, cells, what follows them) when `line` is a row of the matrix."""
    found = re.match(r"\s*([A-Za-z][\w.:-]*?\d[\w.:-]*)(?=\s)", line)
    if matrix is None or not found:
        return None
    cells: list[str] = []
    at = found.end()
    while cell := _CELL.match(line, at):
        if len(cells) >= max(len(matrix.columns), len(matrix.rows) + 1) and cell.group(1) == "N/A":
            break
        cells.append(cell.group(1))
        at = cell.end()
    known = sum(c == "X" or c in _WORDS or c.startswith("NV") for c in cells)
    if not cells or known * 2 < len(cells):
        return None
    return found.group(1), cells, line[at:]


def _split_prefix(line: str) -> tuple[str | None, str]:
    """pdsh and its kind put `host:` before every line."""
    found = _PREFIX.match(line)
    if found and found.group(1).upper() != "LEGEND" and not re.match(r"NIC\d", found.group(1)):
        return found.group(1), line[found.end() :]
    return None, line


def sniff(head: bytes) -> bool:
    """A header row and a GPU row (or affinities), in a text that is not mostly something else."""
    if b"GPU0" not in head:
        return False
    lines = [bare(t[:_LINE]) for t in head.decode("utf-8", "replace").splitlines() if t.strip()]
    some = False
    known = 0
    matrix: _Matrix | None = None
    for line in lines:
        text = _split_prefix(line)[1]
        columns = _header(text)
        if columns:
            matrix = _Matrix(None, columns)
            some = some or _AFFINITY.search(text) is not None
        elif _row(text, matrix):
            some = True
        elif not re.match(r"\s*(?:Legend|NIC Legend|X|SYS|NODE|PHB|PXB|PIX|NV#|NIC\d+)\b", text):
            continue
        known += 1
    return some and known >= _FEW * len(lines)


class _Parser:
    """Collects matrices line by line."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.done: list[_Matrix] = []
        self.open: dict[str | None, _Matrix] = {}
        self.host: str | None = None

    def feed(self, number: int, line: str) -> None:
        prefix, text = _split_prefix(line)
        columns = _header(text)
        if columns is not None and len(self.done) < _MATRICES:
            matrix = _Matrix(prefix or self.host, columns, at=number)
            self.host = None
            self.open[prefix] = matrix
            self.done.append(matrix)
            return
        matrix_now = self.open.get(prefix) or self.open.get(None)
        row = _row(text, matrix_now)
        if row and matrix_now is not None and row[0] not in matrix_now.rows:
            name, cells, tail = row
            matrix_now.rows[name] = cells
            matrix_now.lines[name] = number
            matrix_now.tails[name] = [t.strip() for t in re.split(r"\t+|\s{2,}", tail.strip())]
            return
        legend = _LEGEND.match(text)
        if legend and matrix_now is not None:
            matrix_now.legend[legend.group(1)] = legend.group(2)
            return
        asked = _PROMPT.search(line) if "nvidia-smi" in line else None
        named = asked or _COMMENT.match(line[:_NAMING]) or _NAMED.match(line[:_NAMING])
        if named:
            self.host = named.group(1)


def _numa(tail: list[str]) -> int | None:
    return int(tail[1]) if len(tail) > 1 and tail[1].isdecimal() and len(tail[1]) < 6 else None


def _topology(matrix: _Matrix, host: str, source: str, problems: list[str]) -> Topology:
    """The graph of one matrix."""
    extra = [name for name in matrix.rows if name not in matrix.columns]
    columns = matrix.columns + extra
    missing = [c for c in columns if c not in matrix.rows]
    if missing:
        problems.append(f"{host}: no row for {', '.join(missing[:8])}")
    gpus = []
    nics = []
    for name in columns:
        gpu = _GPU.fullmatch(name)
        tail = matrix.tails.get(name, [])
        if gpu:
            cpus = clean(tail[0], 100) if tail and tail[0] not in ("", "N/A") else None
            gpus.append(Gpu(name, int(gpu.group(1)), numa=_numa(tail), cpu_affinity=cpus))
        else:
            nics.append(Nic(name, matrix.legend.get(name, name)))
    links: dict[frozenset[str], Link] = {}
    locators: dict[tuple[str, str], str] = {}
    for name, cells in matrix.rows.items():
        for column, cell in zip(columns, cells, strict=False):
            if column == name or cell == "X":
                continue
            count = int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else None
            kind = "nvlink" if count is not None else _WORDS.get(cell, "unknown")
            link = Link(name, column, kind, count)
            pair = frozenset((name, column))
            before = links.setdefault(pair, link)
            locators[name, column] = f"line {matrix.lines[name]}"
            if (before.kind, before.count) != (kind, count):
                problems.append(f"{host}: {name} and {column} disagree about their link")
    return Topology(host, tuple(gpus), tuple(nics), tuple(links.values()), source, locators)


def _hosts(matrices: list[_Matrix], stem: str) -> list[str]:
    """A name for each matrix: what the text says, else the file's name, numbered when needed."""
    nameless = sum(m.host is None for m in matrices)
    names = []
    for i, matrix in enumerate(matrices):
        names.append(matrix.host or (stem if nameless == 1 else f"{stem}#{i + 1}"))
    return names


def parse(artifact: Artifact) -> tuple[list[Topology], list[str]]:
    """Topologies in the order of the text, and what was not read."""
    problems: list[str] = []
    parser = _Parser(PurePath(artifact.path).name.split(".")[0])
    for number, line in artifact.lines(problems):
        parser.feed(number, bare(line[:_LINE]))
    hosts = _hosts(parser.done, parser.stem or "stdin")
    found = [
        _topology(m, clean(host, 80), artifact.path, problems)
        for m, host in zip(parser.done, hosts, strict=True)
    ]
    return found, problems


def read(artifact: Artifact) -> Reading:
    """Every matrix of the file."""
    found, problems = parse(artifact)
    if not found:
        problems.append("no matrix in it")
    whole = not problems
    state = "all" if whole else "part" if found else "none"
    reading = Reading(
        Source(artifact.path, KIND, state, tuple(dict.fromkeys(problems))), topologies=found
    )
    for topology in found:
        for link in topology.links:
            reading.add(
                "links",
                host=topology.host,
                a=link.a,
                b=link.b,
                kind=link.kind,
                count=link.count,
                bandwidth=link.bandwidth,
            )
    return reading
