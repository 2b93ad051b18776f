"""Flight Recorder dumps of every version yield the same words; the file order decides nothing."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from collectors.readers import fr_fields, read_paths

if TYPE_CHECKING:
    from collectors.collected import Collected

SHARED = Path(__file__).parents[2].parent / "shared"
ADVERSARIAL = SHARED / "data/flight_recorder/adversarial"
MEGATRON = SHARED / "data/flight_recorder/megatron_moe_16rank"


def _entry(seq: int, **changes: Any) -> dict[str, Any]:
    """One entry of a 2.10 dump."""
    base = {
        "record_id": seq - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        "input_sizes": [[8, 4]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[8, 4]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_700_000_000_500_000_000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }
    return {**base, **changes}


def _dump(entries: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    base = {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {
            0: {
                "last_enqueued_collective": 2,
                "last_started_collective": -1,
                "last_completed_collective": 1,
            }
        },
        "entries": entries,
    }
    return {**base, **changes}


def _read(folder: Path, dumps: dict[str, Any]) -> Collected:
    for name, value in dumps.items():
        data = value if isinstance(value, bytes) else pickle.dumps(value, 2)
        (folder / name).write_bytes(data)
    return read_paths([str(folder)])


def _collectives(collected: Collected) -> list[dict[str, Any]]:
    rows = collected.rows("collectives")
    return sorted(rows, key=lambda r: (r["rank"], r["group_id"], r["p2p"], r["seq"]))


def _events(collected: Collected, kind: str) -> list[dict[str, Any]]:
    found = [r for r in collected.rows("log_events") if r["kind"] == kind]
    return [{**json.loads(r["fields"]), "rank": r["rank"]} for r in found]


def test_one_entry_fills_every_column_that_a_dump_knows(tmp_path: Path) -> None:
    frames = [{"name": "step", "filename": "train.py", "line": 7}]
    entry = _entry(1, frames=frames, time_discovered_started_ns=1_700_000_000_100_000_000)
    collected = _read(tmp_path, {"trace_0": _dump([entry])})
    row = collected.rows("collectives")[0]
    assert row["rank"] == 0
    assert row["group_id"] == "0[0..1]"
    assert (row["op"], row["dtype"], row["shape"]) == ("all_reduce", "bfloat16", "[8, 4]")
    assert (row["bytes_in"], row["bytes_out"]) == (64, 64)
    assert row["start_ns"] < row["end_ns"]
    assert row["state"] == "completed"
    assert row["locator"] == "entry 0 (record 0)"
    assert collected.rows("stacks")[row["stack_id"]]["frames"] == ["step (train.py:7)"]
    assert collected.world_size == 2


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"state": "scheduled", "retired": False}, "issued"),
        ({"state": "started", "retired": False}, "started"),
        ({"state": "scheduled", "retired": True}, "failed"),
        ({"state": "started", "retired": True}, "failed"),
        ({"profiling_name": "gloo:all_reduce", "state": "scheduled", "retired": True}, "completed"),
        ({"profiling_name": "gloo:all_reduce", "state": "scheduled", "retired": False}, "issued"),
    ],
)
def test_state_means_what_the_backend_means_by_it(
    tmp_path: Path, changes: dict[str, Any], state: str
) -> None:
    collected = _read(tmp_path, {"trace_0": _dump([_entry(1, **changes)])})
    assert collected.rows("collectives")[0]["state"] == state


def test_torch_2_2_wrote_a_list_and_counted_in_seq_id(tmp_path: Path) -> None:
    old = {
        "frames": [],
        "seq_id": 5,
        "pg_id": 0,
        "profiling_name": "nccl:all_gather",
        "input_sizes": [[2]],
        "output_sizes": [[4]],
        "state": "scheduled",
        "time_created_ns": 7,
    }
    collected = _read(tmp_path, {"nccl_trace_rank_3": [old]})
    row = collected.rows("collectives")[0]
    assert (row["rank"], row["seq"], row["op"]) == (3, 5, "all_gather")
    assert row["bytes_in"] is None, "no dtype was written, so no size is known"
    assert collected.sources[0].read == "all"


def test_json_and_pickle_of_one_dump_count_once_and_agree(tmp_path: Path) -> None:
    dump = _dump([_entry(1), _entry(2, state="scheduled", retired=False)])
    text = json.dumps({**dump, "pg_status": {"0": {"last_enqueued_collective": "2"}}}).encode()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    from_pickle = _read(tmp_path / "a", {"trace_1": dump})
    from_json = _read(tmp_path / "b", {"trace_1.json": text})
    drop = {"source"}
    assert [{k: v for k, v in r.items() if k not in drop} for r in _collectives(from_json)] == [
        {k: v for k, v in r.items() if k not in drop} for r in _collectives(from_pickle)
    ]
    both = read_paths([str(tmp_path)])
    assert both.tables["collectives"].num_rows == 2
    assert any("the same dump as" in p for s in both.sources for p in s.problems)


def test_gloo_groups_get_the_ranks_whose_dumps_use_their_name(tmp_path: Path) -> None:
    dumps = {}
    for rank in range(4):
        name = "1" if rank < 2 else "2"
        entries = [
            _entry(1, profiling_name="gloo:all_reduce", process_group=(name, "mesh_tp"), pg_id=1),
            _entry(1, profiling_name="gloo:all_reduce"),
        ]
        empty = {"": {"name": "", "desc": "", "ranks": "[]"}}
        dumps[f"rank{rank}.pickle"] = _dump(entries, pg_config=empty)
    collected = _read(tmp_path, dumps)
    groups = {g["group_id"]: (g["axis"], g["ranks"]) for g in collected.rows("groups")}
    assert groups == {
        "0[0..3]": ("world", [0, 1, 2, 3]),
        "1[0..1]": ("tp", [0, 1]),
        "2[2..3]": ("tp", [2, 3]),
    }
    assert all("does not state the members" in s.problems[0] for s in collected.sources)


def test_a_dump_without_pg_config_joins_the_group_that_others_state(tmp_path: Path) -> None:
    bare = _dump([_entry(1)])
    del bare["pg_config"]
    collected = _read(tmp_path, {"trace_0": _dump([_entry(1)]), "trace_1": bare})
    assert {r["group_id"] for r in collected.rows("collectives")} == {"0[0..1]"}
    assert [g["ranks"] for g in collected.rows("groups")] == [[0, 1]]
    assert {e["group_id"] for e in _events(collected, "fr.pg_status")} == {"0[0..1]"}


def test_equal_names_of_different_groups_stay_apart(tmp_path: Path) -> None:
    dumps = {}
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        config = {"1": {"name": "1", "desc": "mesh_tp", "ranks": pair}}
        dumps[f"trace_{rank}"] = _dump(
            [_entry(1, process_group=("1", "mesh_tp"))], pg_config=config
        )
    collected = _read(tmp_path, dumps)
    assert sorted(g["group_id"] for g in collected.rows("groups")) == ["1[0..1]", "1[2..3]"]


def test_point_to_point_counts_its_own_sequence_and_knows_its_peer(tmp_path: Path) -> None:
    config = {"7": {"name": "7", "desc": "mesh_pp", "ranks": "[3, 11]"}}
    send = {"is_p2p": True, "p2p_seq_id": 9, "process_group": ("7", "mesh_pp")}
    entries = [
        _entry(1, profiling_name="nccl:send 0->1", **send),
        _entry(2, profiling_name="nccl:recv 3<-11", **send),
        _entry(3, profiling_name="gloo:recv 3<-?", **send),
    ]
    collected = _read(tmp_path, {"trace_3": _dump(entries, pg_config=config)})
    rows = collected.rows("collectives")
    assert [(r["op"], r["seq"], r["peer"]) for r in rows] == [
        ("send", 9, 11),
        ("recv", 9, 11),
        ("recv", 9, None),
    ]


def test_none_yet_is_minus_one_however_it_is_written(tmp_path: Path) -> None:
    status = {
        "0": {
            "last_enqueued_collective": "18446744073709551615",
            "last_started_collective": 4294967295,
            "last_completed_collective": -1,
        }
    }
    collected = _read(tmp_path, {"trace_0": _dump([_entry(1)], pg_status=status)})
    event = _events(collected, "fr.pg_status")[0]
    assert {event["last_enqueued"], event["last_started"], event["last_completed"]} == {-1}


def test_an_empty_dump_is_a_rank_that_was_seen(tmp_path: Path) -> None:
    collected = _read(
        tmp_path,
        {
            "trace_0": _dump([]),
            "trace_1.json": b'{"pg_config": {}, "pg_status": {}, "version": "2.10"}',
        },
    )
    assert sorted(r["rank"] for r in collected.rows("ranks")) == [0, 1]
    assert [e["entries"] for e in _events(collected, "fr.dump")] == [0, 0]


def test_a_wrapped_ring_says_so(tmp_path: Path) -> None:
    collected = _read(tmp_path, {"trace_0": _dump([_entry(5001, record_id=5000)])})
    event = _events(collected, "fr.dump")[0]
    assert (event["wrapped"], event["first_record"]) == (True, 5000)


@pytest.mark.parametrize("encoding", ["pickle", "json"])
def test_a_dump_that_breaks_off_is_read_up_to_there(tmp_path: Path, encoding: str) -> None:
    dump = _dump([_entry(n) for n in range(1, 101)])
    data = pickle.dumps(dump, 2) if encoding == "pickle" else json.dumps(dump).encode()
    collected = _read(tmp_path, {"trace_0": data[: len(data) // 2]})
    source = collected.sources[0]
    count = collected.tables["collectives"].num_rows
    assert source.read == "part"
    assert 20 < count < 80
    assert f"{count} whole entries" in " ".join(source.problems)
    assert [r["seq"] for r in collected.rows("collectives")] == list(range(1, count + 1))


def test_a_gzip_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps(_dump([_entry(n) for n in range(1, 2001)])).encode())
    collected = _read(tmp_path, {"trace_0.json.gz": data[: len(data) // 2]})
    assert collected.sources[0].read == "part"
    assert collected.tables["collectives"].num_rows > 100


def test_a_dump_whose_name_states_no_rank_takes_it_from_its_groups_or_has_none(
    tmp_path: Path,
) -> None:
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "1": {"name": "1", "desc": "x", "ranks": "[1]"},
    }
    told = _read(tmp_path, {"dump": _dump([_entry(1)], pg_config=config)})
    assert told.rows("collectives")[0]["rank"] == 1
    untold = _read(tmp_path, {"dump": _dump([_entry(1)])})
    assert untold.rows("collectives")[0]["rank"] is None
    assert "no rank" in untold.sources[0].problems[0]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("_dump_7", 7),
        ("rank2.pickle", 2),
        ("comm_lib_trace_rank_0.json.gz", 0),
        ("rank_3_attempt_1.pkl", 3),
        ("rank5/trace.json", 5),
        ("trace", None),
    ],
)
def test_rank_of_a_name(name: str, rank: int | None) -> None:
    assert fr_fields.rank_of_name(name) == rank


def test_foreign_shapes_inside_a_dump_are_no_crash(tmp_path: Path) -> None:
    odd = [
        _entry(1, input_sizes="many", process_group=None, frames=[3], time_created_ns="soon"),
        _entry(2, input_sizes=[[2**60, 2**60]], collective_seq_id=2**80, input_dtypes=[4]),
        5,
    ]
    strange = _dump(odd, pg_config={"0": 3, "1": {"ranks": "["}}, pg_status={"0": None})
    collected = _read(tmp_path, {"trace_0": strange})
    assert collected.tables["collectives"].num_rows == 2
    assert collected.sources[0].read == "part"


def _content(collected: Collected) -> dict[str, list[str]]:
    """All rows as text, in any order of rows."""
    return {
        name: sorted(json.dumps(r, sort_keys=True) for r in collected.rows(name))
        for name in collected.tables
    }


def test_the_order_of_files_decides_nothing(tmp_path: Path) -> None:
    dumps = {f"trace_{r}": _dump([_entry(1, record_id=r)]) for r in range(3)}
    _read(tmp_path, dumps)
    paths = [str(tmp_path / name) for name in dumps]
    assert _content(read_paths(paths)) == _content(read_paths(paths[::-1]))
    assert read_paths(paths).sources == read_paths(paths[::-1]).sources


@pytest.mark.skipif(not ADVERSARIAL.is_dir(), reason="the shared data are not beside the checkout")
def test_the_adversarial_dumps_are_read_whole_and_the_hostile_one_refused() -> None:
    for folder in sorted(p for p in ADVERSARIAL.iterdir() if p.is_dir()):
        collected = read_paths([str(folder)])
        refused = [s.path for s in collected.sources if s.read != "all"]
        hostile = folder.name == "hostile_pickle"
        assert [Path(p).name for p in refused] == (["trace_0"] if hostile else [])
    missing = read_paths([str(ADVERSARIAL / "missing_rank")])
    last = dict.fromkeys(range(4), 0)
    for row in missing.rows("collectives"):
        last[row["rank"]] = max(last[row["rank"]], row["seq"])
    assert min(last, key=lambda r: last[r]) == 2


@pytest.mark.skipif(not MEGATRON.is_dir(), reason="the shared data are not beside the checkout")
def test_megatron_groups_have_their_axes() -> None:
    collected = read_paths([str(MEGATRON / "gpu_error_2nd")])
    axes = {g["name"]: g["axis"] for g in collected.rows("groups")}
    assert axes["TENSOR_MODEL_PARALLEL_GROUP"] == "tp"
    assert axes["PIPELINE_MODEL_PARALLEL_GROUP"] == "pp"
    assert axes["DATA_PARALLEL_GROUP_WITH_CP"] == "dp"
    assert axes["EXPERT_MODEL_PARALLEL_GROUP"] == "ep"
    assert axes["MODEL_PARALLEL_GROUP"] == "unknown"
    assert collected.world_size == 16
    assert {r["rank"] for r in collected.rows("ranks")} == set(range(16))
