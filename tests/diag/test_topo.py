"""`diag topo` draws, checks, and judges a plan before launch; its exit code is what scripts use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from diag.cli import group

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def _matrix(gpus: int = 8, cell: str = "NV18", odd: str | None = None) -> str:
    names = [f"GPU{i}" for i in range(gpus)]
    lines = ["\t" + "\t".join([*names, "NIC0", "CPU Affinity"])]
    for i, name in enumerate(names):
        cells = [" X " if j == i else odd if odd and 5 in (i, j) else cell for j in range(gpus)]
        lines.append("\t".join([name, *cells, "PIX", "0-31"]))
    lines.append("\t".join(["NIC0", *["PIX"] * gpus, " X "]))
    return "\n".join(lines) + "\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"


_PLAN = "world: 16\nnodes: 2\ngpus_per_node: 8\norder: [pp, dp, cp, tp]\n"


class _Place:
    """A folder with a topology and a plan, and the command on them."""

    def __init__(self, folder: Path) -> None:
        self.topo = folder / "gx1.txt"
        self.plan = folder / "plan.yaml"
        self.topo.write_text(_matrix())

    def run(self, *more: str, topo: bool = True, plan: str | None = None) -> Result:
        arguments = ["--from", str(self.topo)] if topo else []
        if plan is not None:
            self.plan.write_text(_PLAN + plan)
            arguments += ["--plan", str(self.plan)]
        return CliRunner().invoke(group, ["topo", *arguments, *more])

    def code(self, *more: str, topo: bool = True, plan: str | None = None) -> int:
        arguments = ["topo", *(["--from", str(self.topo)] if topo else []), *more]
        if plan is not None:
            self.plan.write_text(_PLAN + plan)
            arguments += ["--plan", str(self.plan)]
        code: int = group.main(arguments, "diag", standalone_mode=False)
        return code

    def json(self, **how: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.run("--format", "json", **how).stdout)
        return answer


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Place:
    empty = tmp_path / "no-programs"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))  # whatever GPUs this machine has
    return _Place(tmp_path)


def test_a_node_is_drawn_and_fine(place: _Place) -> None:
    result = place.run()
    assert "gx1: 8 GPUs, 1 NIC" in result.stdout
    assert result.stdout.count("NV18") == 56
    assert "no check failed" in result.stdout
    assert place.code() == 0


def test_json_is_the_contract(place: _Place) -> None:
    answer = place.json(plan="tp: 8\ndp: 2\n")
    assert answer["schema"] == "diag.topo/1"
    (node,) = answer["nodes"]
    assert node["host"] == "gx1"
    assert [g["index"] for g in node["gpus"]] == list(range(8))
    assert node["nics"] == [{"name": "NIC0", "device": "mlx5_0", "state": None}]
    assert {"a": "GPU0", "b": "GPU1", "kind": "nvlink", "count": 18, "bandwidth": None} in node[
        "links"
    ]
    assert answer["checks"] == []
    axes = answer["placement"]["axes"]
    assert axes["tp"]["groups"] == [list(range(8)), list(range(8, 16))]
    assert (axes["tp"]["worst_link"], axes["dp"]["worst_link"]) == ("nvlink", "network")
    assert answer["placement"]["better"] == []


def test_tp_across_nodes_fails_before_launch(place: _Place) -> None:
    assert place.code(plan="tp: 16\n") == 1
    (check,) = place.json(plan="tp: 16\n")["checks"]
    assert (check["cause"], check["severity"]) == ("link.tp-crosses-nodes", "fail")
    assert check["evidence"][0]["source"] == str(place.plan)
    assert check["advice"]


def test_without_a_topology_tp_across_nodes_still_fails(place: _Place) -> None:
    assert place.code(topo=False, plan="tp: 16\n") == 1


def test_without_a_topology_tp_inside_a_node_cannot_be_told(place: _Place) -> None:
    assert place.code(topo=False, plan="tp: 8\ndp: 2\n") == 2
    assert "no topology says" in place.run(topo=False, plan="tp: 8\ndp: 2\n").stdout
    assert place.code(topo=False, plan="dp: 16\n") == 0


def test_a_better_order_is_printed(place: _Place) -> None:
    place.plan.write_text(
        "world: 16\nnodes: 2\ngpus_per_node: 8\norder: [pp, tp, cp, dp]\ntp: 2\ndp: 8\n"
    )
    result = place.run("--plan", str(place.plan))
    assert "better  order [pp, dp, cp, tp]" in result.stdout


def test_a_gpu_with_fewer_links_fails(place: _Place) -> None:
    place.topo.write_text(_matrix(odd="NV16"))
    assert place.code() == 1
    assert "link.nvlink-degraded" in place.run().stdout


def test_a_machine_without_gpus_says_so_in_one_line(place: _Place) -> None:
    result = place.run(topo=False)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no nvidia-smi on this machine" in result.stderr


def test_this_nodes_own_topology_is_asked_for(place: _Place, tmp_path: Path) -> None:
    program = tmp_path / "no-programs" / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexec /bin/cat {place.topo}\n")
    program.chmod(0o755)
    answer = place.json(topo=False)
    assert len(answer["nodes"][0]["gpus"]) == 8
    assert answer["notes"] == []


def test_a_program_that_fails_is_quoted(place: _Place, tmp_path: Path) -> None:
    program = tmp_path / "no-programs" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver'\nexit 9\n")
    program.chmod(0o755)
    result = place.run(topo=False)
    assert result.exit_code == 2
    assert "NVIDIA-SMI has failed: no driver" in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp: 3\n", "tp=3"),
        ("nod: 4\n", "did you mean nodes?"),
        ("tp: [\n", "not YAML"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_its_reasons(
    place: _Place, text: str, said: str
) -> None:
    result = place.run(plan=text)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_without_a_topology_is_refused(place: _Place) -> None:
    place.topo.write_text("step 1 loss 2.0\n")
    result = place.run()
    assert result.exit_code == 2
    assert "no topology in it" in result.stderr


@pytest.mark.parametrize("form", ["text", "md", "html", "json"])
def test_every_form_goes_to_a_file(place: _Place, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    result = place.run("--format", form, "-o", str(out), plan="tp: 16\n")
    assert result.stdout == ""
    assert "link.tp-crosses-nodes" in out.read_text()


def test_html_escapes_what_files_say(place: _Place) -> None:
    place.topo.write_text("host: <script>\n# gx<b>\n" + _matrix())
    page = place.run("--format", "html").stdout
    assert "<script>" not in page
    assert "<b>" not in page
