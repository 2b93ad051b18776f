"""What is seen from outside: processes, stacks, the host, the kernel log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from collectors import schema
from collectors.samplers import cgroup, devices, host, kernel, proc, stacks
from collectors.samplers.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path

SLEEPER = """
import time
def wait_for_data():
    time.sleep(100)
print("ready", flush=True)
wait_for_data()
"""


@pytest.fixture(scope="module")
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_stacks_of_a_sleeping_process_name_where_it_sleeps(sleeper: int) -> None:
    (dump,) = stacks.dump_all([sleeper])
    if dump["problem"] and "ermission" in dump["problem"]:
        pytest.skip("this machine does not let us trace other processes")
    assert dump["problem"] is None
    (main,) = (thread for thread in dump["threads"] if thread["main"])
    assert main["frames"][0] == "wait_for_data (<string>:4)"
    assert main["frames"][-1] == "<module> (<string>:6)"


def test_a_process_that_is_gone_or_no_python_is_a_problem_and_no_exception() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    other = subprocess.Popen(["sleep", "100"])
    first, second = stacks.dump_all([gone.pid, other.pid])
    other.kill()
    other.wait()
    assert first["threads"] == second["threads"] == []
    assert first["problem"].startswith("py-spy: ")
    assert second["problem"].startswith("py-spy: ")


def test_process_facts(sleeper: int) -> None:
    facts = proc.facts(sleeper)
    assert facts["state"] == "S"
    assert facts["threads"] >= 1
    assert facts["rss"] > 1 << 20
    assert facts["io"] is None or facts["io"]["rchar"] > 0
    assert proc.facts(2**22 - 1)["state"] is None


def test_a_command_name_cannot_confuse_the_stat_line() -> None:
    fields = ["S", "11"] + ["0"] * 9 + ["250", "50", "0", "0", "20", "0", "7", "0", "991"]
    fields += ["0", "3"] + ["0"] * 27 + ["9"]
    parsed = proc.parse_stat(f"42 (a) b (c) {' '.join(fields)}\n")
    assert parsed is not None
    assert (parsed.state, parsed.parent, parsed.threads, parsed.start_ticks) == ("S", 11, 7, 991)
    assert parsed.cpu_s == pytest.approx(300 / os.sysconf("SC_CLK_TCK"))
    assert parsed.rss == 3 * os.sysconf("SC_PAGE_SIZE")
    assert parsed.wait_status == 9
    assert proc.parse_stat("42 (x) S 1 2") is None


def test_host_rows_fit_the_table_and_hold_what_this_machine_says(tmp_path: Path) -> None:
    sampler = host.HostSampler("here", tmp_path)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass
    row = sampler.sample()
    assert schema.table("hosts", [row]).num_rows == 1
    assert 0 <= row["cpu"] <= 1
    assert 0 < row["memory_used"] <= row["memory_total"]
    assert row["disk_free"] > 0
    gone = host.HostSampler("here", tmp_path / "gone").sample()
    assert gone["disk_free"] is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_the_cgroup_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    files = {
        1: {
            "memory.limit_in_bytes": "1000",
            "memory.usage_in_bytes": "700",
            "memory.stat": "total_inactive_file 200",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
        },
        2: {
            "memory.max": "1000",
            "memory.current": "700",
            "memory.stat": "anon 1\ninactive_file 200",
            "memory.events": "low 0\noom 4\noom_kill 3",
        },
    }[version]
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_group", lambda: (version, folder))
    assert cgroup.memory() == cgroup.Memory(limit=1000, used=500, oom_kills=3)
    (folder / next(iter(files))).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert cgroup.memory().limit is None


def test_kernel_records_become_dmesg_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.parse_kmsg("6,339,5140900,-;hello; there\n SUBSYSTEM=x") == (
        5.1409,
        "hello; there",
    )
    assert kernel.parse_kmsg("nonsense") is None
    records = [
        (1.0, "Out of memory: Killed process 1 (old)"),
        (9.5, "Out of memory: Killed process 7 (python) total-vm:1kB"),
        (9.6, "usb 1-1: new device"),
        (9.7, "NVRM: Xid (PCI:0000:10:1c): 79, pid=7, GPU has fallen off the bus."),
    ]
    monkeypatch.setattr(kernel, "_kmsg", lambda: records)
    lines, reason = kernel.since(9.0)
    assert reason is None
    assert lines == [
        "[    9.500000] Out of memory: Killed process 7 (python) total-vm:1kB",
        "[    9.700000] NVRM: Xid (PCI:0000:10:1c): 79, pid=7, GPU has fallen off the bus.",
    ]


def test_a_kernel_log_that_is_closed_to_us_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[tuple[float, str]]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel, "_kmsg", refuse)
    monkeypatch.setattr(kernel, "_dmesg", refuse)
    lines, reason = kernel.since(0.0)
    assert lines == []
    assert reason is not None
    assert "not permitted" in reason


def test_the_recorder_leaves_rows_and_reasons(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "here")
    recorder.start()
    recorder.stop()
    assert not recorder.is_alive()
    rows = [json.loads(line) for line in (tmp_path / "nodes/here/host.jsonl").open()]
    assert schema.table("hosts", rows).num_rows >= 1
    sampler, reason = devices.open_devices("here")
    if sampler is None:
        assert recorder.problems["devices"] == reason
        assert not (tmp_path / "nodes/here/devices.jsonl").exists()
    else:
        rows = [json.loads(line) for line in (tmp_path / "nodes/here/devices.jsonl").open()]
        assert schema.table("devices", rows).num_rows >= 1


def test_a_recorder_whose_folder_is_gone_ends_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("in the way")
    recorder = Recorder(tmp_path, "here")
    recorder.start()
    recorder.join(10)
    assert not recorder.is_alive()
    assert recorder.problems["host"].startswith("sampling ended")
