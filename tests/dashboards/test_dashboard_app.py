"""The server: if this breaks, it shows stale or foreign things, or takes a bad run for a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import dashboard_synthetic as synthetic
import pytest
from click.testing import CliRunner

from collectors.collected import empty
from dashboards.app import HOST, create, listen
from dashboards.runs import Runs, fingerprint
from diag.commands.dashboard import command

if TYPE_CHECKING:
    from pathlib import Path


def runs_of(*paths: Path, read=lambda _path: synthetic.healthy()) -> Runs:
    return Runs(paths, read=read, judge=synthetic.report_for)


def test_runs_are_keyed_by_name_and_never_by_path(tmp_path: Path) -> None:
    for name in ("a/run", "b/run", "b/other"):
        (tmp_path / name).mkdir(parents=True)
    runs = runs_of(tmp_path / "a/run", tmp_path / "b/run", tmp_path / "b/other")
    assert runs.keys() == ["run", "run-2", "other"]
    assert runs.view("run-2").path == tmp_path / "b/run"
    assert runs.find(None) == "run"
    for asked in (str(tmp_path / "a/run"), "../run", "/etc", ""):
        assert runs.find(asked) is None


def test_a_run_is_read_again_only_when_its_files_changed(tmp_path: Path) -> None:
    reads = []

    def read(path: Path):
        reads.append(path)
        return synthetic.healthy()

    (tmp_path / "run.json").write_text("{}")
    runs = runs_of(tmp_path, read=read)
    key = runs.keys()[0]
    first = runs.view(key)
    assert runs.view(key) is first
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "exits.jsonl").write_text("{}")
    assert runs.view(key).version != first.version
    assert len(reads) == 2


def test_a_live_log_counts_as_changed_though_its_mtime_stands_still(tmp_path: Path) -> None:
    control = tmp_path / "control.bin"
    control.write_bytes(bytes(4096))
    os.utime(control, ns=(10**18, 10**18))
    before = fingerprint(tmp_path)
    control.write_bytes(b"\x01" + bytes(4095))
    os.utime(control, ns=(10**18, 10**18))
    assert fingerprint(tmp_path) != before


def test_a_damaged_run_is_a_view_with_a_problem(tmp_path: Path) -> None:
    def read(path: Path):
        raise ValueError("run.json: not JSON at line 1\nmore")

    view = runs_of(tmp_path, read=read).view(tmp_path.name)
    assert view.report is None
    assert view.problem == "ValueError: run.json: not JSON at line 1"
    assert not view.timed


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("run")
    return create([path], runs_of(path)).server.test_client()


def test_only_pages_exist(client) -> None:
    for page in ("/", "/timeline", "/topology", "/artifacts", "/_dash-layout"):
        assert client.get(page, base_url="http://127.0.0.1:8050").status_code == 200
    for other in ("/run.json", "/etc/passwd", "/assets/../app.py", "/..%2f..%2fetc/passwd", "/x"):
        assert client.get(other, base_url="http://localhost:8050").status_code == 404


def test_another_host_name_is_refused(client) -> None:
    assert client.get("/", base_url="http://evil.example:8050").status_code == 403
    assert client.get("/", base_url="http://[::1]:8050").status_code == 200


def test_the_page_loads_nothing_from_elsewhere(client) -> None:
    page = client.get("/", base_url="http://127.0.0.1:8050").get_data(as_text=True)
    assert "<script" in page
    assert "https://" not in page
    assert "http://" not in page


def test_it_listens_on_loopback_and_falls_back_to_a_free_port() -> None:
    with listen(0) as first:
        taken = first.getsockname()[1]
        with listen(taken) as second:
            assert second.getsockname()[0] == HOST == "127.0.0.1"
            assert second.getsockname()[1] not in {0, taken}


def test_an_unknown_run_is_one_line_and_exit_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "nowhere" in result.output


def test_the_command_prints_its_url_and_ends_well_with_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from diag.cli import main; main()",
            "dashboard",
            str(tmp_path),
            "--port",
            "0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url + "_dash-layout") as answer:  # noqa: S310
            assert json.load(answer)["type"] == "MantineProvider"
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=30)
        assert rest == ""
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


def test_a_folder_of_nothing_is_a_run_without_anything(tmp_path: Path) -> None:
    view = runs_of(tmp_path, read=lambda _path: empty()).view(tmp_path.name)
    assert view.problem is None
    assert not view.timed
    assert not view.live
