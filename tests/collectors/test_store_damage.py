"""A damaged run directory is still a report: what is refused is named, nothing breaks."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectors import store
from collectors.agent import flight
from playbooks import engine
from playbooks.report import html, markdown, text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from collectors.collected import Collected

START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
DEEP = "[" * 200_000
HUGE = 10**30
RUN: dict[str, Any] = {
    "schema": "diag.run/1", "name": "job", "command": ["python", "job.py"], "cwd": "/x",
    "host": "h", "started_ns": START, "ended_ns": START + 60 * SECOND, "state": "finished",
    "exit_code": 1, "signal": None, "interrupted": False, "world_size": 2, "attempts": 1,
    "versions": {"diag": "1"}, "env": {"set": {}, "kept": []},
    "agent": {"enabled": True, "problems": []},
    "hangs": [{"since_ns": START + 5 * SECOND, "detected_ns": START + 20 * SECOND,
               "hang_after_s": 15, "capture": "captures/0001-hang", "verdict_ns": None}],
}  # fmt: skip
STACKS: dict[str, Any] = {
    "time_ns": START + 21 * SECOND,
    "ranks": [
        {"rank": r, "pid": 10 + r, "problem": None, "threads": [
            {"name": "MainThread", "main": True, "state": "idle", "frames": ["wait (a.py:1)"]}]}
        for r in (0, 1)
    ],
}  # fmt: skip
EXIT = {"rank": 1, "attempt": 0, "pid": 11, "host": "h", "ended_ns": START + 4 * SECOND,
        "exit_code": None, "signal": 9, "status_from": "proc"}  # fmt: skip
SAMPLE = {"host": "h", "time_ns": START, "cpu": 0.5, "cores": 2, "memory_used": 1}


def _rank(where: Path, rank: int) -> None:
    where.mkdir(parents=True)
    meta = {"rank": rank, "attempt": 0, "pid": 10 + rank, "host": "h", "world_size": 2}
    writer = flight.Writer(where, meta)
    writer.note(g=1, name="0", desc="default_pg", ranks=[0, 1], backend="gloo")
    op, loss = writer.name("all_reduce"), writer.name("loss")
    for step in range(4):
        at = START + step * SECOND
        writer.put(flight.STEP, 0, at, step=step, end=at + SECOND, state=flight.DONE, a=1, b=0)
        bits = struct.unpack("<q", struct.pack("<d", 2.5))[0]
        writer.put(flight.NUMBER, loss, at, step=step, a=bits)
        slot = writer.put(
            flight.COLLECTIVE, op, at + 1000, group=1, a=64, b=64, seq=step + 1, step=step
        )
        if step < 3:
            writer.finish(slot, at + 2000, wait=1000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small valid run directory; its segments cut after the records, as sparse copies are."""
    run = tmp_path_factory.mktemp("damage") / "run"
    for rank in (0, 1):
        _rank(run / "ranks" / f"{rank:05d}", rank)
    (run / "captures/0001-hang").mkdir(parents=True)
    for look in (0, 1):
        (run / f"captures/0001-hang/stacks-{look}.json").write_text(json.dumps(STACKS))
    (run / "nodes/h").mkdir(parents=True)
    (run / "nodes/h/host.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    (run / "exits.jsonl").write_text(json.dumps(EXIT) + "\n")
    (run / "run.json").write_text(json.dumps(RUN))
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    return copy


def _all_forms(run: Path) -> Collected:
    collected = store.read_run(run)
    report = engine.diagnose(collected)
    for form in (text.render(report), markdown.render(report), html.render(report, collected)):
        assert form.strip()
        form.encode()  # text that no terminal or file takes would break here
    json.dumps(report.as_json())
    return collected


def _problems(collected: Collected) -> str:
    return "\n".join(f"{s.path}: {p}" for s in collected.sources for p in s.problems)


def test_the_undamaged_run_has_no_problem(run: Path) -> None:
    collected = _all_forms(run)
    assert _problems(collected) == ""
    assert collected.world_size == 2
    assert collected.tables["collectives"].num_rows == 8
    assert collected.tables["steps"].column("loss").to_pylist() == [2.5] * 8
    assert collected.tables["stacks"].num_rows == 4


def _set(path: str, base: dict[str, Any], **more: Any) -> Callable[[Path], None]:
    return lambda run: (run / path).write_text(json.dumps({**base, **more})) and None


def _write(path: str, content: str | bytes) -> Callable[[Path], None]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda run: (run / path).write_bytes(raw) and None


def _cut(path: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        raw = (run / path).read_bytes()
        (run / path).write_bytes(raw[: len(raw) // 2 - 1])

    return damage


def _noise(path: str) -> Callable[[Path], None]:
    return _write(path, np.random.default_rng(7).bytes(100_003))


def _names(line: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        with (run / "ranks/00000/names.jsonl").open("a") as handle:
            handle.write(line + "\n")

    return damage


def _record(column: str, value: int) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / "ranks/00000/flight-00.bin"
        rows = np.fromfile(path, dtype=flight.DTYPE)
        rows[3][column] = value
        rows.tofile(path)

    return damage


META = {"rank": 0, "attempt": 0, "pid": 10, "host": "h", "world_size": 2}
_META = "ranks/00000/meta.json"
_LOOK = "captures/0001-hang/stacks-0.json"
_HOST = "nodes/h/host.jsonl"
_SEGMENT = "ranks/00000/flight-00.bin"
FILES = ("run.json", _META, "ranks/00000/names.jsonl", _SEGMENT, "exits.jsonl", _LOOK, _HOST)
BAD = {"huge": HUGE, "negative": -HUGE, "text": "many", "list": [1], "bool": True,
       "mapping": {"a": 1}, "real": 1.5}  # fmt: skip

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    **{f"cut {name}": (_cut(name), name.rpartition("/")[2]) for name in FILES},
    **{f"noise {name}": (_noise(name), name.rpartition("/")[2]) for name in FILES},
    **{f"deep {name}": (_write(name, DEEP), name.rpartition("/")[2]) for name in FILES},
    **{f"run world_size {k}": (_set("run.json", RUN, world_size=v), "world_size")
       for k, v in BAD.items()},
    **{f"run started_ns {k}": (_set("run.json", RUN, started_ns=v), "started_ns")
       for k, v in BAD.items()},
    **{f"run exit_code {k}": (_set("run.json", RUN, exit_code=v), "exit_code")
       for k, v in BAD.items()},
    **{f"run hangs {k}": (_set("run.json", RUN, hangs=v), "hangs") for k, v in BAD.items()},
    **{f"run hang since {k}": (_set("run.json", RUN, hangs=[{"since_ns": v}]), "hangs")
       for k, v in BAD.items()},
    **{f"run state {k}": (_set("run.json", RUN, state=v), "state")
       for k, v in BAD.items() if k != "text"},
    **{f"run agent {k}": (_set("run.json", RUN, agent={"problems": v}), "agent")
       for k, v in BAD.items() if k != "list"},
    **{f"meta world_size {k}": (_set(_META, META, world_size=v), "world_size")
       for k, v in BAD.items()},
    **{f"meta rank {k}": (_set(_META, META, rank=v), "rank") for k, v in BAD.items()},
    **{f"meta attempt {k}": (_set(_META, META, attempt=v), "attempt") for k, v in BAD.items()},
    **{f"exit rank {k}": (_set("exits.jsonl", EXIT, rank=v), "rank") for k, v in BAD.items()},
    **{f"exit signal {k}": (_set("exits.jsonl", EXIT, signal=v), "signal")
       for k, v in BAD.items() if k != "negative"},
    **{f"exit host {k}": (_set("exits.jsonl", EXIT, host=v), "host")
       for k, v in BAD.items() if k != "text"},
    **{f"sample cpu {k}": (_set(_HOST, SAMPLE, cpu=v), "cpu")
       for k, v in BAD.items() if k not in ("huge", "negative", "real")},
    **{f"sample time {k}": (_set(_HOST, SAMPLE, time_ns=v), "time_ns") for k, v in BAD.items()},
    **{f"stacks time {k}": (_set(_LOOK, STACKS, time_ns=v), "time_ns") for k, v in BAD.items()},
    **{f"stacks ranks {k}": (_set(_LOOK, STACKS, ranks=v), "ranks") for k, v in BAD.items()},
    **{f"stacks threads {k}":
       (_set(_LOOK, STACKS, ranks=[{"rank": 0, "threads": v}]), "threads")
       for k, v in BAD.items()},
    **{f"stacks frames {k}":
       (_set(_LOOK, STACKS, ranks=[{"rank": 0, "threads": [{"frames": v}]}]), "frames")
       for k, v in BAD.items() if k != "list"},
    **{f"share {k}": (_write("captures/0001-hang/proc.json", json.dumps(
        {"ranks": [{"rank": v, "cpu_share": 1}, {"rank": 0, "cpu_share": v}, v]})), "")
       for k, v in BAD.items()},
    "deep exception": (_write("ranks/00000/exception.json", DEEP), "ranks/00000/exception.json"),
    "odd exception": (_write("ranks/00000/exception.json", json.dumps(
        {"type": [1], "message": "\ud800", "traceback": {}, "time_ns": 1e300})), ""),
    "name id": (_names('{"n": 4000000000, "t": "x"}'), "names.jsonl"),
    "group id": (_names('{"g": -1, "name": "", "desc": "", "ranks": [], "backend": ""}'), "names"),
    "group ranks": (
        _names('{"g": 2, "name": "", "desc": "", "ranks": [1e30], "backend": ""}'), "names"),
    "mesh": (_names('{"mesh": {"dp": 99999999999999999999}}'), "names.jsonl"),
    "name is half a pair": (_names('{"n": 9, "t": "\\ud800"}\n?'), "names.jsonl"),
    "record kind": (_record("kind", 9), "1 records are damaged"),
    "record state": (_record("state", 77), "1 records are damaged"),
    "record time": (_record("start", -5), "1 records are damaged"),
    "record end": (_record("end", (1 << 63) - 1), "1 records are damaged"),
    "record serial": (_record("serial", 999), "1 records are damaged"),
    "record bytes": (_record("seq", (1 << 63) - 1), "1 records are damaged"),
    "segment is a folder": (lambda run: (run / "ranks/00001/flight-01.bin").mkdir(), "flight-01"),
    "look of another name": (lambda run: shutil.copy(  # type: ignore[dict-item]
        run / _LOOK, run / "captures/0001-hang/stacks-x.json"), ""),
    "the same rank twice": (lambda run: shutil.copytree(  # type: ignore[dict-item]
        run / "ranks/00000", run / "ranks/00007"), "as another log does"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_rest_is_read(run: Path, name: str) -> None:
    damage, told = DAMAGES[name]
    damage(run)
    collected = _all_forms(run)
    assert told in _problems(collected)
    assert collected.world_size is None or collected.world_size == 2
    assert 1 in collected.ints("steps", "rank")  # the other rank's log is whole


def test_a_sparse_file_of_terabytes_is_not_loaded(run: Path) -> None:
    for name in FILES:
        with (run / name).open("r+b") as handle:
            handle.truncate(1 << 40)
    problems = _problems(_all_forms(run))
    for name in ("run.json", "meta.json", "stacks-0.json", "exits.jsonl", "host.jsonl"):
        assert name in problems


def test_kept_tables_of_other_types_are_rebuilt_from_the_logs(run: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    store.compact(run)
    assert store.read_run(run).tables["steps"].num_rows == 8
    path = run / "tables/steps.parquet"
    table = pq.read_table(path)
    at = table.schema.get_field_index("start_ns")
    words = table.column("start_ns").cast(pa.string())
    pq.write_table(table.set_column(at, "start_ns", words), path)
    assert _all_forms(run).tables["steps"].schema.field("start_ns").type == pa.int64()
    path.write_bytes(path.read_bytes()[:100])
    assert _all_forms(run).tables["steps"].num_rows == 8


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rank", "threads", "frames", "since_ns", "set", "problems"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_any_json_value_anywhere_is_taken_or_refused(run: Path, data: st.DataObject) -> None:
    for name, base in (("run.json", RUN), (_META, META), ("exits.jsonl", EXIT), (_LOOK, STACKS)):
        keys = data.draw(st.lists(st.sampled_from(sorted(base)), max_size=3))
        (run / name).write_text(json.dumps({**base, **{key: data.draw(_JSON) for key in keys}}))
    collected = _all_forms(run)
    assert collected.run["name"] is None or isinstance(collected.run["name"], str)
    assert [s.path for s in collected.sources].count("run.json") == 1
