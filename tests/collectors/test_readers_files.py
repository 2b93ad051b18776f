"""Which files are read, as what, and that no content of any file ends in a traceback."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from collectors.collected import Source
from collectors.readers import artifact, files, read_artifact, read_paths, settle_all
from collectors.readers.registry import READERS

if TYPE_CHECKING:
    import pytest

_LOG = "step 1 loss 2.0\n"
_MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n"
_PLAN = "world: 8\nnodes: 1\ntp: 8\norder: [tp]\n"
_SAMPLES = [
    _LOG.encode(),
    _MATRIX.encode(),
    _PLAN.encode(),
    b'{"message": {"message": "ValueError: x"}}',
    pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [{"state": "x", "pg_id": 0}]}, 2),
    b'{"version": "2.4", "pg_config": {}, "pg_status": {}, "entries": []}',
    gzip.compress(b"Traceback (most recent call last):\nKeyError: 3\n"),
    b"=" * 20 + b"\nx FAILED\n" + b"-" * 20 + b"\nFailures:\n[0]:\n  rank : 3\n",
    b"a &b [*b]\nworld: *b\ntp: 2\n",
]


def _kinds(*paths: Path) -> dict[str, str]:
    return {Path(s.path).name: s.kind for s in read_paths([str(p) for p in paths]).sources}


def test_kinds_are_told_by_content_and_not_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(_LOG)
    (tmp_path / "b.log").write_text(_MATRIX)
    (tmp_path / "c.txt").write_text(_PLAN)
    (tmp_path / "d_0.yaml").write_bytes(_SAMPLES[4])
    (tmp_path / "e.bin").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "f.log").write_text("")
    (tmp_path / "g.md").write_text("# nothing that decides anything\n")
    assert _kinds(tmp_path) == {
        "a.json": "log",
        "b.log": "nvidia-smi-topo",
        "c.txt": "plan",
        "d_0.yaml": "flight-recorder",
        "e.bin": "unknown",
        "f.log": "unknown",
        "g.md": "text",
    }


def test_what_is_not_there_or_not_known_is_said(tmp_path: Path) -> None:
    (tmp_path / "e.bin").write_bytes(bytes(range(256)) * 40)
    gone = str(tmp_path / "gone.log")
    sources = {s.path: s for s in read_paths([gone, str(tmp_path)]).sources}
    assert sources[gone] == Source(gone, "unknown", "none", ("there is no such file or folder",))
    assert sources[str(tmp_path / "e.bin")].read == "none"


def test_a_folder_is_walked_without_following_links_and_each_file_once(tmp_path: Path) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text(_LOG)
    top = tmp_path / "top"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "deep" / "er" / "x.log").write_text(_LOG)
    (top / "link.log").symlink_to(secret)
    (top / "loop").symlink_to(top)
    file = top / "deep" / "er" / "x.log"
    collected = read_paths([str(top), str(file), str(top / "deep")])
    assert [Path(s.path).name for s in collected.sources] == ["x.log"]
    assert collected.tables["log_events"].num_rows == 1


def test_a_walk_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILES", 3)
    for n in range(6):
        (tmp_path / f"{n}.log").write_text(_LOG)
    sources = read_paths([str(tmp_path)]).sources
    assert sum(s.kind == "log" for s in sources) == 3
    assert any("more than 3 files" in p for s in sources for p in s.problems)


def test_a_plan_with_aliases_or_wrong_axes_is_refused_with_reasons(tmp_path: Path) -> None:
    bomb = "world: &a [x]\nb: &b [*a, *a]\ntp: [*b, *b]\n"
    wrong = "world: 8\ntp: 3\norder: [tp]\nppp: 2\n"
    cut = "world: 8\ntp: [1, 2\n"
    for text, said in ((bomb, "aliases"), (wrong, "did you mean pp?"), (cut, "not YAML at line")):
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        collected = read_paths([str(path)])
        assert collected.plan is None
        assert said in " ".join(collected.sources[0].problems)


def test_a_pile_reads_the_same_whatever_the_order_of_its_names(tmp_path: Path) -> None:
    for n, data in enumerate(_SAMPLES):
        (tmp_path / f"part_{n}").write_bytes(data)
    paths = sorted(str(p) for p in tmp_path.iterdir())
    first, second = read_paths(paths), read_paths(paths[::-1])
    assert first.sources == second.sources
    assert {n: t.to_pylist() for n, t in first.tables.items()} == {
        n: t.to_pylist() for n, t in second.tables.items()
    }


def test_stacks_of_several_dumps_keep_their_collectives(tmp_path: Path) -> None:
    for rank in range(3):
        frames = [{"name": f"f{rank}", "filename": "t.py", "line": rank}]
        entry = {"state": "scheduled", "pg_id": 0, "frames": frames, "collective_seq_id": 1}
        dump = {"version": "2.10", "pg_config": {}, "entries": [entry]}
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump, 2))
    collected = read_paths([str(tmp_path)])
    stacks = collected.rows("stacks")
    for row in collected.rows("collectives"):
        assert stacks[row["stack_id"]]["frames"] == [f"f{row['rank']} (t.py:{row['rank']})"]


def test_what_several_files_say_of_a_process_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[rank3]: 2025-01-01 10:00:00 step 1 loss 2\n")
    (tmp_path / "b.log").write_text("srun: error: gx1: task 3: Killed\n")
    (row,) = read_paths([str(tmp_path)]).rows("ranks")
    assert (row["rank"], row["host"], row["signal"]) == (3, "gx1", 9)
    assert row["last_seen_ns"] is not None


def _everything(data: bytes) -> None:
    """Sniff and read with every reader, wanted or not."""
    found = artifact.from_bytes(data, "fuzz_3")
    for reader in READERS:
        assert reader.sniff(found.head) in (True, False)
        reading = reader.read(found)
        assert reading.source.read in ("all", "part", "none")
        assert reading.source.read == "all" or reading.source.problems
        settle_all([reading])
        for row in reading.rows.get("log_events", []):
            assert isinstance(json.loads(row["fields"]), dict)
            assert row["quote"].isprintable() or row["quote"] == ""
    read_artifact(found)


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
@example(b"")
@example(b"\x80\x02")
@example(b"{" * 50_000)
@example(b"[" * 50_000)
@example(b"world: " + b"[" * 5_000 + b"\ntp: 1")
@example(b"world: 9" + b"9" * 5_000 + b"\ntp: 1\n")
@example(b"\xef\xbb\xbf{}")
def test_no_bytes_crash_a_reader(data: bytes) -> None:
    _everything(data)


@given(
    st.sampled_from(_SAMPLES),
    st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=3)), max_size=4),
    st.integers(0, 400),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_damage_to_a_real_format_crashes_a_reader(
    data: bytes, edits: list[tuple[int, bytes]], cut: int
) -> None:
    damaged = bytearray(data)
    for place, new in edits:
        at = place % (len(damaged) + 1)
        damaged[at : at + len(new)] = new
    _everything(bytes(damaged[: len(damaged) - cut % (len(damaged) + 1)]))


_WORDS = st.sampled_from(
    [
        "Traceback (most recent call last):",
        "KeyError: x",
        '  File "a", line 3, in f',
        "[rank3]: ",
        "0: ",
        "====",
        "Failures:",
        "[0]:",
        "  rank : 3 (local_rank: 99999999999)",
        "WorkNCCL(SeqNum=99999999999999999999999, OpType=A, Timeout(ms)=1)",
        "step 999999999999 loss 1e999",
        "x FAILED",
        "Root Cause",
        "\x1b[31m",
        "E0231 25:61:61.1 a.c:1] ",
        "2025-02-30 10:00:00 ",
        "out of memory. Tried to allocate 1..2 GiB",
        "GPU0",
        "\tNV4",
        "tasks 0-99999999: Killed",
        "srun: error: a: ",
        "exitcode : -99 (pid: 1)",
    ]
)


@given(st.lists(st.lists(_WORDS, max_size=5).map("".join), max_size=12).map("\n".join))
@settings(max_examples=200, deadline=None)
def test_no_mixture_of_known_words_crashes_the_log_reader(text: str) -> None:
    collected = read_paths(["-"], text.encode())
    assert set(collected.tables) >= {"ranks", "log_events"}


def test_a_run_directory_is_read_as_one_and_joined_with_loose_files(tmp_path: Path) -> None:
    run = tmp_path / "pile" / "run"
    run.mkdir(parents=True)
    about = {"schema": "diag.run/1", "name": "mine", "state": "finished", "exit_code": 0}
    (run / "run.json").write_text(json.dumps({**about, "world_size": 2}))
    (run / "exits.jsonl").write_text('{"rank": 1, "pid": 7, "exit_code": null, "signal": 9}\n')
    (tmp_path / "pile" / "job.log").write_text(_LOG)
    collected = read_paths([str(tmp_path / "pile")])
    assert collected.run["name"] == "mine"
    assert collected.world_size == 2
    assert [r["kind"] for r in collected.rows("log_events")] == ["train.step"]
    assert (1, 9) in {(r["rank"], r["signal"]) for r in collected.rows("ranks")}


def test_a_foreign_run_json_does_not_hide_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": "other/1"}')
    (tmp_path / "job.log").write_text(_LOG)
    assert _kinds(tmp_path)["job.log"] == "log"
