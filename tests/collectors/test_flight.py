"""The flight log keeps what was written, whatever happens to the process, within its bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from collectors.agent import flight
from collectors.agent.live import LiveRanks
from collectors.agent.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path

META = {"rank": 3, "attempt": 0, "pid": 1, "host": "h"}


def _writer(path: Path) -> flight.Writer:
    path.mkdir(parents=True, exist_ok=True)
    return flight.Writer(path, META)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    name, shape = writer.name("all_reduce"), writer.name("[4, 8]")
    slot = writer.put(
        flight.COLLECTIVE, name, 100, group=2, dtype=1, a=128, b=-5, seq=2**40, step=7,
        microbatch=3, stage=1, shape=shape, peer=11,
    )  # fmt: skip
    writer.finish(slot, 250, flight.FAILED, wait=40)
    log = flight.read(tmp_path)
    (row,) = log.records
    assert (row["kind"], row["state"], row["start"], row["end"]) == (3, flight.FAILED, 100, 250)
    assert (row["a"], row["b"], row["seq"], row["wait"]) == (128, -5, 2**40, 40)
    assert (row["step"], row["microbatch"], row["stage"], row["peer"]) == (7, 3, 1, 11)
    assert log.names[int(row["name"])] == "all_reduce"
    assert log.names[int(row["shape"])] == "[4, 8]"
    assert log.dropped == 0
    assert not log.closed


def test_expert_load_is_four_numbers_a_layer(tmp_path: Path) -> None:
    recorder = Recorder(_writer(tmp_path), lambda: None)
    with recorder.step(7):
        recorder.expert_load(3, (0.25, 0.25, 0.25, 0.25), 0.0)
        recorder.expert_load(4, (0.0, 1.0, 0.0, 0.0), 0.5)
    log = flight.read(tmp_path)
    told = {
        log.names[int(row["name"])]: float(row["a"].view(np.float64))
        for row in log.records[log.records["kind"] == flight.NUMBER]
    }
    assert told == {
        "expert_load.3.busiest": 0, "expert_load.3.share": 0.25, "expert_load.3.entropy": 1,
        "expert_load.3.dropped": 0, "expert_load.4.busiest": 1, "expert_load.4.share": 1,
        "expert_load.4.entropy": 0, "expert_load.4.dropped": 0.5,
    }  # fmt: skip


def test_numpy_and_struct_agree_on_the_record() -> None:
    import numpy as np

    assert np.dtype(flight.DTYPE).itemsize == flight.SIZE


def test_the_bound_holds_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "SEGMENT_RECORDS", 8)
    monkeypatch.setattr(flight, "MOST_SEGMENTS", 3)
    writer = _writer(tmp_path)
    slots = [writer.put(flight.PHASE, 0, 1000 + i) for i in range(100)]
    writer.finish(slots[0], 5)  # overwritten long ago: must not touch its successor
    writer.finish(slots[-1], 7)
    log = flight.read(tmp_path)
    assert len(list(tmp_path.glob("flight-*.bin"))) == 3
    assert log.dropped == 100 - len(log.records)
    assert list(log.records["start"]) == [1000 + i for i in range(100 - len(log.records), 100)]
    assert list(log.records["end"]) == [0] * (len(log.records) - 1) + [7]


def test_threads_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "SEGMENT_RECORDS", 64)
    writer = _writer(tmp_path)

    def work(number: int) -> None:
        for i in range(100):
            writer.finish(writer.put(flight.PHASE, writer.name(f"t{number}"), i + 1), i + 2)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = flight.read(tmp_path)
    assert len(log.records) == 800
    assert set(log.records["state"]) == {flight.DONE}
    assert sorted({log.names[int(n)] for n in log.records["name"]}) == [f"t{n}" for n in range(8)]


def test_a_full_disk_bounds_the_log_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "SEGMENT_RECORDS", 8)
    writer = _writer(tmp_path)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for i in range(20):
        writer.put(flight.PHASE, 0, i + 1)
    log = flight.read(tmp_path)
    assert list(log.records["start"]) == [*range(13, 21)]
    assert any("No space left" in problem for problem in log.problems)


def test_sigkill_loses_nothing(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, signal, sys, pathlib
        from collectors.agent import flight
        w = flight.Writer(pathlib.Path({str(tmp_path)!r}), {META!r})
        n = w.name("forward")
        for i in range(1000):
            w.put(flight.PHASE, n, i + 1)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    log = flight.read(tmp_path)
    assert list(log.records["start"]) == [*range(1, 1001)]
    assert log.names == {1: "forward"}


def test_a_damaged_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    for i in range(10):
        writer.put(flight.PHASE, writer.name("data"), i + 1)
    segment = tmp_path / "flight-00.bin"
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "flight-00.bin").write_bytes(segment.read_bytes()[: 5 * flight.SIZE + 17])
    (cut / "meta.json").write_text((tmp_path / "meta.json").read_text())
    (cut / "names.jsonl").write_text('{"n": 1, "t": "data"}\n{"n": 2, "t"')
    log = flight.read(cut)
    assert list(log.records["start"]) == [1, 2, 3, 4, 5]
    assert log.names == {1: "data"}
    assert any("is cut" in p for p in log.problems)
    assert any("line 2" in p for p in log.problems)
    (cut / "meta.json").write_text("[]")
    with pytest.raises(ValueError, match="does not name a rank"):
        flight.read(cut)


def test_others_see_live_how_far_a_rank_is(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "ranks" / "00003")
    (tmp_path / "ranks" / "00009").mkdir()  # claimed, nothing written yet
    live = LiveRanks(tmp_path)
    slot = writer.put(flight.PHASE, writer.name("data"), 50)
    writer.phase(1)
    (one,) = live.poll()
    assert (one.rank, one.records, one.last_ns, one.phase) == (3, 1, 50, "data")
    assert (one.steps, one.step_median_ns, one.closed) == (0, None, False)
    writer.finish(slot, 80)
    writer.phase(0)
    writer.progress(4, 90, 20)
    writer.close()
    (one,) = live.poll()
    assert (one.last_ns, one.phase, one.steps, one.step_median_ns) == (80, None, 4, 20)
    assert one.closed
