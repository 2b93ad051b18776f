"""`nvidia-smi topo -m` of every era yields the same graph; what a text lacks yields no link."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from collectors.readers import read_paths
from collectors.topology.draw import draw

if TYPE_CHECKING:
    from collectors.collected import Collected
    from collectors.topology.graph import Topology

CASES = Path(__file__).parents[2].parent / "shared" / "cases"

_NEW = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tNODE\tSYS\tPXB\t0-31,64-95\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\tPIX\t0-31,64-95\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tNV18\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV18\t X \tPHB\t32-63\t1\t\tN/A
NIC0\tPXB\tPIX\tSYS\tPHB\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_7
"""
_LINKS = {
    ("GPU0", "GPU1"): ("nvlink", 18),
    ("GPU0", "GPU2"): ("node", None),
    ("GPU0", "GPU3"): ("socket", None),
    ("GPU0", "NIC0"): ("pcie-switches", None),
    ("GPU1", "GPU2"): ("node", None),
    ("GPU1", "GPU3"): ("socket", None),
    ("GPU1", "NIC0"): ("pcie-switch", None),
    ("GPU2", "GPU3"): ("nvlink", 18),
    ("GPU2", "NIC0"): ("socket", None),
    ("GPU3", "NIC0"): ("host-bridge", None),
}


def _read(text: str, name: str = "-", folder: Path | None = None) -> Collected:
    if folder is None:
        return read_paths(["-"], text.encode())
    (folder / name).write_text(text)
    return read_paths([str(folder / name)])


def _links(topology: Topology) -> dict[tuple[str, str], tuple[str, int | None]]:
    return {tuple(sorted((x.a, x.b))): (x.kind, x.count) for x in topology.links}  # type: ignore[misc]


def _old_names(text: str) -> str:
    """NIC columns by device name and no legend, as drivers wrote before NIC0."""
    return text[: text.index("\nNIC Legend")].replace("NIC0", "mlx5_7")


def _no_affinity(text: str) -> str:
    lines = text.splitlines()
    return "\n".join("\t".join(line.split("\t")[:6]) for line in lines[:6]) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        _NEW,
        _NEW.replace("\t", "      "),
        _NEW.replace("\tGPU0\tGPU1", "\x1b[4m\tGPU0\tGPU1", 1).replace("ID\n", "ID\x1b[0m\n", 1),
        _NEW.replace("NODE\tSYS", "NODESYS").replace("NV18\tNODE", "NV18NODE"),
        _NEW.replace("SYS", "SOC"),
        _NEW.replace("\tNIC0\tCPU Aff", "\tCPU Aff", 1),
        _NEW.replace("\n", "\r\n"),
        _no_affinity(_NEW),
    ],
    ids=["tabs", "spaces", "ansi", "glued", "soc", "header-cell", "crlf", "no-affinity"],
)
def test_every_dialect_is_the_same_graph(text: str) -> None:
    collected = _read(text)
    (topology,) = collected.topologies
    assert _links(topology) == _LINKS
    assert [g.index for g in topology.gpus] == [0, 1, 2, 3]
    assert collected.tables["links"].num_rows == len(_LINKS)
    assert collected.sources[0].read == "all"


def test_nics_affinity_and_places_are_kept() -> None:
    (topology,) = _read(_NEW).topologies
    assert [(n.name, n.device) for n in topology.nics] == [("NIC0", "mlx5_7")]
    assert (topology.gpus[2].numa, topology.gpus[2].cpu_affinity) == (1, "32-63")
    assert topology.locators["GPU2", "GPU3"] == "line 4"


def test_nics_named_by_device_are_nics() -> None:
    (topology,) = _read(_old_names(_NEW)).topologies
    assert [n.name for n in topology.nics] == ["mlx5_7"]
    assert topology.link("GPU1", "mlx5_7") is not None


@pytest.mark.parametrize(
    ("head", "host"),
    [
        ("# gx31", "gx31"),
        ("=== gx31 ===", "gx31"),
        ("host: gx31", "gx31"),
        ("[root@gx31 ~]# nvidia-smi topo -m", "gx31"),
        ("me@gx31:~$ nvidia-smi topo -m", "gx31"),
    ],
)
def test_the_host_stands_before_the_matrix(head: str, host: str) -> None:
    both = _read(f"{head}\n{_NEW}\n{head.replace('gx31', 'gx32')}\n{_NEW}")
    assert [t.host for t in both.topologies] == [host, "gx32"]


def test_the_host_stands_before_every_line_of_pdsh() -> None:
    lines = [f"{host}: {line}" for line in _NEW.splitlines()[:6] for host in ("gx31", "gx32")]
    found = _read("\n".join(lines)).topologies
    assert [t.host for t in found] == ["gx31", "gx32"]
    assert all(_links(t) == _LINKS for t in found)


def test_without_a_host_the_file_names_it(tmp_path: Path) -> None:
    assert _read(_NEW, "node7.topo.txt", tmp_path).topologies[0].host == "node7"


def test_a_cut_matrix_has_the_links_of_its_rows_and_says_what_it_lacks() -> None:
    collected = _read("\n".join(_NEW.splitlines()[:3]) + "\n")
    (topology,) = collected.topologies
    assert topology.link("GPU2", "GPU3") is None
    assert topology.link("GPU0", "GPU3") is not None
    assert collected.sources[0].read == "part"
    assert "no row for GPU2, GPU3" in collected.sources[0].problems[0]


def test_a_header_alone_has_no_links() -> None:
    collected = _read(_NEW.splitlines()[0] + "\n")
    assert collected.topologies[0].links == ()
    assert collected.sources[0].read == "part"


def test_cells_that_disagree_are_a_problem() -> None:
    collected = _read(_NEW.replace("GPU1\tNV18", "GPU1\tNV17"))
    assert "GPU1 and GPU0 disagree" in collected.sources[0].problems[0]


def test_a_word_that_is_not_known_is_no_guess() -> None:
    (topology,) = _read(_NEW.replace("NV18", "MX4")).topologies
    link = topology.link("GPU0", "GPU1")
    assert link is not None
    assert link.kind == "unknown"


def test_a_log_that_shows_a_matrix_stays_a_log() -> None:
    text = _NEW + "step 1 loss 2.0\n" * 100
    assert _read(text).sources[0].kind == "log"


def test_the_drawing_fits_a_terminal_and_shows_every_gpu() -> None:
    names = [f"GPU{i}" for i in range(16)]
    rows = [f"{a}\t" + "\t".join(" X " if a == b else "NV18" for b in names) for a in names]
    (topology,) = _read("\t" + "\t".join(names) + "\n" + "\n".join(rows) + "\n").topologies
    lines = draw(topology)
    assert max(len(line) for line in lines) <= 100
    assert sum(line.startswith("GPU") for line in lines) == 16
    assert sum(line.count("NV18") for line in lines) == 16 * 15


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not beside the checkout")
def test_the_matrices_of_the_cases_are_read_whole() -> None:
    found = {}
    for number in ("043", "044", "045", "046", "049", "050", "058"):
        (case,) = CASES.glob(f"{number}-*")
        collected = read_paths([str(case / "inputs")])
        (topology,) = collected.topologies
        size = len(topology.gpus) + len(topology.nics)
        assert len(topology.links) == size * (size - 1) // 2
        found[number] = (len(topology.gpus), len(topology.nics), topology.links[0].count)
    assert found["045"] == (8, 8, 18)
    assert found["044"] == (4, 1, 12)
    assert found["049"][2] is None
