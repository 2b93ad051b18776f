"""Every line that decides a diagnosis is recognised behind whatever prefix, with its numbers."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from collectors.readers import read_paths

if TYPE_CHECKING:
    from pathlib import Path

    from collectors.collected import Collected


def _read(text: str | bytes) -> Collected:
    data = text.encode() if isinstance(text, str) else text
    return read_paths(["-"], data)


def _events(text: str | bytes, kind: str | None = None) -> list[dict[str, Any]]:
    rows = _read(text).rows("log_events")
    return [{**json.loads(r["fields"]), "@": r} for r in rows if kind is None or r["kind"] == kind]


def _ns(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp()) * 1_000_000_000  # type: ignore[arg-type]


_WORK = "WorkNCCL(SeqNum=52, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000)"
_CAUGHT = f"Watchdog caught collective operation timeout: {_WORK} ran for 600015 milliseconds"


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank3]:[E0903 21:51:47.340661582 ProcessGroupNCCL.cpp:685] [Rank 3] ", 3),
        ("[rank3]: [rank3]:[E0903 21:51:47.340661582 ProcessGroupNCCL.cpp:685] [Rank 3] ", 3),
        ("[E 2024-05-06 07:08:09.010203 ProcessGroupNCCL.cpp:737] [Rank 3] ", 3),
        ("[default1]:[E ProcessGroupNCCL.cpp:737] [Rank 3] ", 3),
        ("0: [rank3]:[E0903 21:51:47.340661582 ProcessGroupNCCL.cpp:685] ", 3),
        ("\x1b[31m[rank3]:\x1b[0m [E0903 21:51:47.34 ProcessGroupNCCL.cpp:685] ", 3),
        ("[E0903 01:01:01.34 Odd.cpp:685] [PG ID 0 PG GUID 4(mesh_tp) Rank 3] ", 3),
        ("[1,3]<stderr>:", 3),
        ("2026-04-14T09:20:03.464947841Z [rank 3] ", 3),
        ("nodea: [rank3]:[E1112 20:31:48.21 ProcessGroupNCCL.cpp:15] [PG 0 (tp) Rank 3] ", 3),
        ("(Worker pid=77, ip=10.0.0.1) [rank3]: ", 3),
        ("3: ", 3),
        ("", None),
    ],
)
def test_a_watchdog_line_is_read_behind_every_prefix(prefix: str, rank: int | None) -> None:
    (event,) = _events(f"{prefix}{_CAUGHT} before timing out.\n", "nccl.timeout")
    assert event["@"]["rank"] == rank
    assert (event["op"], event["seq"], event["numel_in"]) == ("all_reduce", 52, 9)
    assert (event["timeout_ms"], event["ran_ms"]) == (600_000, 600_015)
    assert event["@"]["locator"] == "line 1"


def test_the_oldest_watchdog_line_has_no_sizes() -> None:
    line = (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, "
        "OpType=_ALLGATHER_BASE, Timeout(ms)=1800000) ran for 1802212 milliseconds before "
        "timing out."
    )
    (event,) = _events(line, "nccl.timeout")
    assert (event["op"], event["seq"]) == ("all_gather_into_tensor", 469_508)
    assert "numel_in" not in event


_LINES = [
    (
        (
            "[PG 0 Rank 7] Timeout at NCCL work: 1, last enqueued NCCL work: 1, last completed "
            "NCCL "
            "work: 3452013982."
        ),
        "nccl.watchdog-status",
        {"work": 1, "last_enqueued": 1, "last_completed": -1, "pg_id": "0"},
    ),
    (
        (
            "[PG 0 (default_pg) Rank 3] Exception (either an error or timeout) detected by "
            "watchdog "
            "at work: 7753, last enqueued NCCL work: 7755, last completed NCCL work: 7752."
        ),
        "nccl.watchdog-status",
        {"work": 7753, "last_enqueued": 7755, "last_completed": 7752},
    ),
    (
        (
            "[PG ID 1 PG GUID 2(mesh_tp) Rank 4]  failure detected by watchdog at work sequence "
            "id: 9 "
            "PG status: last enqueued work: 11, last completed work: 8, last started work: 9"
        ),
        "nccl.watchdog-status",
        {
            "work": 9,
            "last_enqueued": 11,
            "last_completed": 8,
            "last_started": 9,
            "pg": "2",
            "pg_description": "mesh_tp",
        },
    ),
    (
        (
            "Received a dump signal due to a collective timeout from  rank 5 and we will try "
            "our best "
            "to dump the debug info. Last enqueued NCCL work: 3, last completed NCCL work: 2."
        ),
        "nccl.dump-signal",
        {"from_rank": 5, "last_completed": 2},
    ),
    (
        "Finished writing Flight Recorder debug info to /tmp/nccl_trace_rank_0",
        "nccl.dump-written",
        {"file": "/tmp/nccl_trace_rank_0"},
    ),
    (
        (
            "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in "
            "monitoring enqueued collectives. "
        ),
        "nccl.heartbeat-stuck",
        {"seconds": 480},
    ),
    (
        "Could not acquire GIL within 300 ms on exit, possible GIL induced hang",
        "nccl.gil",
        {"ms": 300},
    ),
    (
        (
            "NCCL communicator encountered error set by ProcessGroupNCCL:  remote error "
            "detected from "
            "rank: 6"
        ),
        "nccl.remote-error",
        {"from_rank": 6},
    ),
    (
        (
            "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
            "key-value store by key '0', but store->get('0') got error: Connection reset"
        ),
        "nccl.unique-id",
        {"from_rank": 0, "message": "Connection reset"},
    ),
    (
        (
            " - [0] Timeout at collective: ALLREDUCE, #3 - To our best knowledge, the "
            "lagging/dead/mismatched ranks that caused the desync are: [1, 2] finished "
            "collective #2, "
            "but didn't join collective #3 (count from 1)"
        ),
        "nccl.desync",
        {"op": "all_reduce", "seq": 3, "ranks": [1, 2]},
    ),
    (
        (
            "[../gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 5000ms for send "
            "operation "
            "to complete"
        ),
        "gloo.timeout",
        {"timeout_ms": 5000, "direction": "send"},
    ),
    (
        (
            "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45442. "
            "This is "
            "typically caused by a remote worker crashing."
        ),
        "gloo.closed-by-peer",
        {"peer": "127.0.0.1", "port": 45442},
    ),
    ("Application timeout caused pair closure", "gloo.pair-closed", {}),
    (
        "[enforce fail at ../pair.cc:446] op.preamble.length <= op.nbytes. 64 vs 32",
        "gloo.size-mismatch",
        {"received": 64, "expected": 32},
    ),
    (
        "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 3000 ms",
        "gloo.monitored-barrier",
        {"ranks": [1, 2], "timeout_ms": 3000},
    ),
    (
        "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 3000 ms",
        "gloo.monitored-barrier",
        {"ranks": [2]},
    ),
    (
        (
            "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0. Please check rank 0 logs for faulty rank."
        ),
        "gloo.monitored-barrier-peer",
        {"reporter": 1},
    ),
    (
        "Timed out after 1801 seconds waiting for clients. 6/8 clients joined.",
        "store.clients-missing",
        {"seconds": 1801, "joined": 6, "expected": 8},
    ),
    (
        "The client socket has timed out after 3000ms while trying to connect to (h.x.y, 29878).",
        "store.connect-timeout",
        {"timeout_ms": 3000, "host": "h.x.y", "port": 29878},
    ),
    ("wait timeout after 2000ms, keys: /nokey", "store.wait-timeout", {"keys": "/nokey"}),
    (
        (
            "TCP client failed to connect/validate to host h1:29500 - retrying (try=0, "
            "timeout=3000ms, "
            "delay=3195ms): refused"
        ),
        "store.retry",
        {"host": "h1", "port": 29500},
    ),
    (
        "failed (exitcode: -9) local_rank: 0 (pid: 123) of binary: /usr/bin/python",
        "elastic.worker-exit",
        {"exit_code": None, "signal": 9, "local_rank": 0, "pid": 123},
    ),
    ("Sending process 28218 closing signal SIGTERM", "elastic.signal-sent", {"signal": 15}),
    ("Received 15 death signal, shutting down workers", "elastic.death-signal", {}),
    (
        "The node 'gx2_11_0' has failed to send a keep-alive heartbeat to the rendezvous 'x'",
        "elastic.heartbeat-lost",
        {"node": "gx2_11_0"},
    ),
    (
        "srun: error: cn214: tasks 3-5,7: Segmentation fault (core dumped)",
        "slurm.task-exit",
        {"host": "cn214", "tasks": [3, 4, 5, 7], "signal": 11, "core_dumped": True},
    ),
    (
        "srun: error: bw14: task 0: Exited with exit code 1",
        "slurm.task-exit",
        {"tasks": [0], "exit_code": 1},
    ),
    (
        "srun: error: o0616: task 0: Out Of Memory",
        "slurm.task-exit",
        {"tasks": [0], "out_of_memory": True},
    ),
    (
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some "
            "of your "
            "processes may have been killed by the cgroup out-of-memory handler."
        ),
        "slurm.oom",
        {"events": 1, "step": "14604003.0"},
    ),
    (
        "slurmstepd: error: *** JOB 7 ON g1 CANCELLED AT 2025-10-02T08:00:11 DUE TO TIME LIMIT ***",
        "slurm.cancelled",
        {"what": "JOB", "host": "g1", "reason": "TIME LIMIT"},
    ),
    (
        (
            "Nov 12 20:31:42 nodeb kernel: Memory cgroup out of memory: Killed process 30105 "
            "(python3) "
            "total-vm:2kB, anon-rss:3kB, file-rss:1kB"
        ),
        "kernel.oom-killed",
        {"pid": 30105, "task": "python3", "anon_rss": 3072},
    ),
    (
        (
            "[Tue May 20 13:15:46 2025] NVRM: Xid (PCI:0000:ab:00): 79, pid=1896, name=python, "
            "GPU has "
            "fallen off the bus."
        ),
        "kernel.xid",
        {"xid": 79, "pid": 1896, "pci": "0000:ab:00"},
    ),
    (
        "DataLoader worker (pid 991) is killed by signal: Killed. ",
        "dataloader.worker-killed",
        {"pid": 991, "signal": 9},
    ),
    (
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: "
            "can't "
            "allocate memory: you tried to allocate 4398046511104 bytes. Error code 12 (Cannot)"
        ),
        "oom.cpu",
        {"requested": 1 << 42},
    ),
]


@pytest.mark.parametrize(("line", "kind", "fields"), _LINES, ids=[k for _, k, _ in _LINES])
def test_a_known_line_yields_its_typed_record(line: str, kind: str, fields: dict[str, Any]) -> None:
    (event,) = _events(line, kind)
    assert {name: event.get(name) for name in fields} == fields


GIB = 1 << 30
MIB = 1 << 20


def test_the_memory_sentence_of_torch_1() -> None:
    (event,) = _events(
        "RuntimeError: CUDA out of memory. Tried to allocate 22.00 MiB (GPU 3; 6.00 GiB total "
        "capacity; 5.25 GiB already allocated; 0 bytes free; 5.50 GiB reserved in total by "
        "PyTorch)",
        "oom.cuda",
    )
    assert event["requested"] == 22 * MIB
    assert (event["gpu"], event["capacity"], event["free"]) == (3, 6 * GIB, 0)
    assert (event["allocated"], event["reserved"]) == (5.25 * GIB, 5.5 * GIB)
    assert event["reserved_unallocated"] == 0.25 * GIB


def test_the_memory_sentence_of_torch_2_with_every_part() -> None:
    (event,) = _events(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.00 GiB of which 228.00 MiB is free. Process 8165 has 14.25 GiB memory in "
        "use. Process 8166 has 1.00 GiB memory in use. Including non-PyTorch memory, this process "
        "has 63.00 GiB memory in use. 60.00 GiB allowed; Of the allocated memory 50.00 GiB is "
        "allocated by PyTorch, with 512.00 MiB allocated in private pools (e.g., CUDA Graphs), and "
        "5.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
        "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        "oom.cuda",
    )
    assert (event["requested"], event["capacity"]) == (2 * GIB, 79 * GIB)
    assert (event["free"], event["in_use"], event["allowed"]) == (228 * MIB, 63 * GIB, 60 * GIB)
    assert (event["allocated"], event["private_pools"]) == (50 * GIB, 512 * MIB)
    assert (event["reserved_unallocated"], event["reserved"]) == (5 * GIB, 55 * GIB)
    assert event["others"] == [
        {"pid": 8165, "bytes": int(14.25 * GIB)},
        {"pid": 8166, "bytes": GIB},
    ]


def test_a_cut_memory_sentence_has_no_invented_numbers() -> None:
    (event,) = _events(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 2 has a tot", "oom.cuda"
    )
    assert (event["requested"], event["gpu"]) == (1.5 * GIB, 2)
    assert "free" not in event
    assert "allocated" not in event


def test_tracebacks_of_interleaved_ranks_are_put_together() -> None:
    both = []
    for text in (
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        "    main()",
        '  File "train.py", line 5, in main',
        "    raise KeyError({!r})",
        "    ^^^^^^",
        "KeyError: {!r}",
    ):
        both += [f"[rank{r}]: {text.format(r)}" for r in (1, 0)]
    events = _events("\n".join(both), "python.exception")
    assert {(e["@"]["rank"], e["type"], e["message"]) for e in events} == {
        (0, "KeyError", "0"),
        (1, "KeyError", "1"),
    }
    assert events[0]["frames"] == ["main (train.py:5)", "<module> (train.py:9)"]


def test_a_chained_and_a_launcher_traceback_are_marked() -> None:
    text = """Traceback (most recent call last):
  File "a.py", line 1, in f
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in g
RuntimeError: second
Traceback (most recent call last):
  File "/x/torch/distributed/launcher/api.py", line 277, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    events = _events(text, "python.exception")
    assert [(e["message"], e["chained"], e["launcher"]) for e in events] == [
        ("first", False, False),
        ("second", True, False),
        ("", False, True),
    ]


_SUMMARY = """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-10-21_14:08:02
  host      : gx1
  rank      : 9 (local_rank: 1)
  exitcode  : -15 (pid: 13775) (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 13775
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-10-21_14:08:00
  host      : gx1
  rank      : 8 (local_rank: 0)
  exitcode  : 1 (pid: 13774)
  error_file: /tmp/e/error.json
  traceback : Traceback (most recent call last):
    File "train.py", line 5, in main
      raise ValueError("boom")
  ValueError: boom
============================================================
"""


@pytest.mark.parametrize("prefix", ["", "gx1: ", "0: "])
def test_the_launchers_summary_yields_an_event_and_a_process_for_each_rank(prefix: str) -> None:
    first = "gx1: [rank8]: hello\n" if prefix == "gx1: " else ""
    text = first + "".join(prefix + line + "\n" for line in _SUMMARY.splitlines())
    collected = _read(text)
    events = [
        json.loads(r["fields"])
        for r in collected.rows("log_events")
        if r["kind"] == "elastic.failure"
    ]
    assert [(e["rank"], e["root"], e["exit_code"], e.get("signal")) for e in events] == [
        (9, False, None, 15),
        (8, True, 1, None),
    ]
    assert events[1]["message"] == "ValueError: boom"
    ranks = {r["rank"]: r for r in collected.rows("ranks")}
    assert (ranks[8]["exit_code"], ranks[8]["pid"], ranks[8]["host"]) == (1, 13774, "gx1")
    assert ranks[9]["signal"] == 15
    assert ranks[8]["ended_ns"] == _ns(2026, 10, 21, 14, 8, 0)


def test_local_ranks_become_ranks_by_the_summary_of_their_own_file() -> None:
    text = f"[default1]:{_CAUGHT}\n" + _SUMMARY
    (event,) = _events(text, "nccl.timeout")
    assert event["@"]["rank"] == 9
    assert event["@"]["host"] == "gx1"


def test_srun_tasks_are_ranks_unless_they_are_launchers() -> None:
    (plain,) = _events(f"5: {_CAUGHT}\n", "nccl.timeout")
    assert plain["@"]["rank"] == 5
    (under,) = _events(
        f"1: {_CAUGHT}\n1: Sending process 7 closing signal SIGTERM\n", "nccl.timeout"
    )
    assert under["@"]["rank"] is None


def test_a_summary_of_which_the_end_is_cut_still_names_its_rank() -> None:
    cut = _SUMMARY[: _SUMMARY.index("  error_file: /tmp")]
    failures = _events(cut, "elastic.failure")
    assert [f["rank"] for f in failures] == [9, 8]


def test_times_without_a_year_take_it_from_other_lines_of_the_pile(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"[rank1]:[E0903 21:51:47.000000001 P.cpp:6] {_CAUGHT}\n")
    (tmp_path / "b.log").write_text("2025-09-03 21:41:44 step 1255 loss 2.2\n")
    rows = {r["kind"]: r["time_ns"] for r in read_paths([str(tmp_path)]).rows("log_events")}
    assert rows["nccl.timeout"] == _ns(2025, 9, 3, 21, 51, 47) + 1
    assert rows["train.step"] == _ns(2025, 9, 3, 21, 41, 44)


def test_zones_are_honoured() -> None:
    line = "2025-06-14T04:43:31.5+02:00 sx kernel: NVRM: Xid (PCI:0000:ab:00): 48, pid=4, x"
    (event,) = _events(line, "kernel.xid")
    assert event["@"]["time_ns"] == _ns(2025, 6, 14, 2, 43, 31) + 500_000_000
    assert event["@"]["host"] == "sx"


_STEPS = [
    ("step 1255 loss 2.2011 gnorm 0.41 tok/s 27306", 1255, 2.2011),
    ("epoch 2 it 1370 loss 0.3312 dice 0.811 lr 1.0e-04 t 2.1s", 1370, 0.3312),
    ("epoch 002:   880 / 3120 loss=2.912, ntokens=31863, gnorm=0.690", 880, 2.912),
    ("[titan] 2026-09-09 08:00:12,273 - root - INFO - step:  1  loss: -1.0000  tps: 407", 1, -1.0),
    (
        (
            " iteration       20/    1000 | elapsed time per iteration (ms): 1354.9 | lm loss: "
            "1.2E+01 |"
        ),
        20,
        12.0,
    ),
    ("Epoch: [1][ 10/500]\tTime  0.512 ( 0.6)\tData  0.1 ( 0.1)\tLoss 6.9e+00 (7.0e+00)", 10, 6.9),
    (" 12%|#2  | 120/1000 [00:10<01:20, 10.00it/s, loss=3.5]", 120, 3.5),
    ("step 9  loss nan", 9, float("nan")),
]


@pytest.mark.parametrize(("line", "step", "loss"), _STEPS, ids=[str(s) for _, s, _ in _STEPS])
def test_progress_lines_of_common_trainers(line: str, step: int, loss: float) -> None:
    (event,) = _events(line, "train.step")
    assert event["step"] == step
    assert event["loss"] == pytest.approx(loss, nan_ok=True)


def test_step_times_are_seconds_whatever_the_trainer_prints() -> None:
    lines = [
        "iteration 20/1000 | elapsed time per iteration (ms): 1354.9 | lm loss: 1.2E+01",
        "step 200 | frames 1536 | loss 0.6175 |   0.42 s",
        "step 10 loss 3 1.52 s/step",
        "step 10 loss 3 4.00it/s",
    ]
    found = [e["step_time"] for e in _events("\n".join(lines), "train.step")]
    assert found == pytest.approx([1.3549, 0.42, 1.52, 0.25])


def test_a_saved_checkpoint_is_no_progress() -> None:
    text = "saving checkpoint at iteration 100 to /ckpt/x in torch format\n"
    assert [e["@"]["kind"] for e in _events(text)] == ["train.save"]


def test_gzip_carriage_returns_odd_bytes_and_a_cut_last_line_are_normal() -> None:
    data = b"\xff\xfe junk\rstep 1 loss 2.0\r\x1b[1mstep 2 loss 1.5\n" + _CAUGHT.encode()[:120]
    plain = _events(data)
    assert [e["@"]["kind"] for e in plain] == ["train.step", "train.step", "nccl.timeout"]
    assert [e["@"] for e in _events(gzip.compress(data))] == [e["@"] for e in plain]


def test_fingerprints_of_both_ranks_are_kept() -> None:
    line = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE, TensorShape=[8], "
        "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float, device=cpu)), but Rank 1 "
        "is running collective: CollectiveFingerPrint(SequenceNumber=4, OpType=BROADCAST, "
        "TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float))."
        "Collectives differ in the following aspects: \t Op type: ALLREDUCEvs BROADCAST"
    )
    (event,) = _events(line, "c10d.mismatch")
    assert event["fingerprints"]["0"] == {
        "op": "all_reduce",
        "shape": "[8]",
        "dtypes": "Float",
        "seq": 4,
    }
    assert event["fingerprints"]["1"]["op"] == "broadcast"
    assert event["differs"] == ["Op type"]


def test_quotes_carry_no_escape_sequences() -> None:
    (event,) = _events(f"\x1b]0;title\x07\x1b[31m{_CAUGHT}\u202e\x00\n", "nccl.timeout")
    assert event["@"]["quote"].isprintable()


def test_an_error_file_names_its_exception_and_place(tmp_path: Path) -> None:
    folder = tmp_path / "none_ab12/attempt_1/3"
    folder.mkdir(parents=True)
    stack = 'Traceback (most recent call last):\n  File "t.py", line 4, in main\nValueError: boom\n'
    message = {
        "message": "ValueError: boom on 1",
        "extraInfo": {"py_callstack": stack, "timestamp": "1795996457"},
    }
    (folder / "error.json").write_text(json.dumps({"message": message}))
    (row,) = read_paths([str(tmp_path)]).rows("log_events")
    fields = json.loads(row["fields"])
    assert row["kind"] == "python.exception"
    assert row["time_ns"] == 1_795_996_457_000_000_000
    assert (fields["type"], fields["local_rank"], fields["attempt"]) == ("ValueError", 3, 1)
    assert fields["frames"] == ["main (t.py:4)"]
