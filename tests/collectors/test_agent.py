"""The agent in real jobs: what it sees, and that the job does not notice.

One DDP job under the agent serves most tests; each further job here costs a torch import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from collectors import store
from collectors.agent import environment

if TYPE_CHECKING:
    from collectors.collected import Collected

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parents[1] / "scripts"
STEPS = 6


def launch(run: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the agent's environment, as `diag run` does, but unsupervised."""
    run.mkdir(exist_ok=True)
    base = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    return subprocess.run(
        words, env=environment(run, base), capture_output=True, text=True, timeout=120, check=False
    )


def torchrun(run: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return launch(run, *launcher, f"--nproc-per-node={ranks}", *words)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    run = tmp_path_factory.mktemp("ddp")
    done = torchrun(run, 2, str(SCRIPTS / "plain_ddp.py"), str(STEPS))
    assert done.returncode == 0, done.stderr
    assert "diag" not in done.stderr
    return store.read_run(run)


def test_each_rank_has_its_steps(ddp: Collected) -> None:
    assert ddp.world_size == 2
    for rank in (0, 1):
        steps = [row for row in ddp.rows("steps") if row["rank"] == rank]
        done = [row["step"] for row in steps if row["end_ns"]]
        assert done == list(range(STEPS))
        starts = [row["start_ns"] for row in steps]
        assert starts == sorted(starts)


def test_each_step_says_how_long_it_ran_and_how_long_it_waited_for_a_core(ddp: Collected) -> None:
    for row in ddp.rows("steps"):
        if row["end_ns"]:
            whole = row["end_ns"] - row["start_ns"]
            assert row["cpu_ns"] > 0
            assert row["queued_ns"] >= 0
            assert row["cpu_ns"] + row["queued_ns"] <= 1.05 * whole + 5e6


def test_phases_lie_inside_their_step_and_do_not_overlap(ddp: Collected) -> None:
    for rank in (0, 1):
        phases = [row for row in ddp.rows("phases") if row["rank"] == rank]
        for step in range(STEPS):
            kinds = [row["phase"] for row in phases if row["step"] == step]
            # Step 0 also makes the loader's iterator.
            assert kinds[-4:] == ["data", "forward", "backward", "optimizer"]
        ends = [row["end_ns"] for row in phases]
        assert all(end <= after["start_ns"] for end, after in zip(ends, phases[1:], strict=False))


def test_the_collectives_of_ddp_itself_are_there_and_pair_up(ddp: Collected) -> None:
    rows = ddp.rows("collectives")
    by_rank = {rank: [r for r in rows if r["rank"] == rank] for rank in (0, 1)}
    signature = ("group_id", "seq", "op", "dtype", "shape", "bytes_in", "bytes_out")
    first, second = ([tuple(r[c] for c in signature) for r in by_rank[k]] for k in (0, 1))
    assert first == second
    gradients = [r for r in by_rank[0] if r["op"] == "all_reduce" and r["bytes_in"] > 1000]
    parameters = 8 * (640 * 640 + 640) + 640 + 1
    assert sum(r["bytes_in"] for r in gradients) == STEPS * parameters * 4
    assert {r["state"] for r in rows} == {"completed"}
    assert all(r["issue_ns"] < r["end_ns"] for r in rows)
    assert all(r["dtype"] == "float32" for r in gradients)


def test_numbers_of_the_operations_run_without_a_gap(ddp: Collected) -> None:
    rank, seq = ddp.ints("collectives", "rank"), ddp.ints("collectives", "seq")
    for one in (0, 1):
        assert list(seq[rank == one]) == list(range(1, int(np.sum(rank == one)) + 1))


def test_the_group_is_named(ddp: Collected) -> None:
    (group,) = ddp.rows("groups")
    assert group["ranks"] == [0, 1]
    assert (group["axis"], group["backend"]) == ("world", "gloo")


def test_ranks_end_regularly_and_memory_is_sampled(ddp: Collected) -> None:
    assert [(r["rank"], r["closed"], r["exception"]) for r in ddp.rows("ranks")] == [
        (0, True, None),
        (1, True, None),
    ]
    assert {r["rank"] for r in ddp.rows("memory") if r["rss"] > 1 << 20} == {0, 1}


def test_tables_kept_as_parquet_read_back_the_same(ddp: Collected, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "ranks").mkdir(parents=True)
    (run / "run.json").write_text('{"state": "finished", "world_size": 2}')
    (run / "exits.jsonl").write_text(
        '{"rank": 1, "attempt": 0, "pid": 7, "host": "h", "ended_ns": 5, "exit_code": null,'
        ' "signal": 9}\n{"rank"'
    )
    before = store.read_run(run)
    store.compact(run)
    (run / "exits.jsonl").unlink()
    after = store.read_run(run)
    assert after.rows("ranks") == before.rows("ranks")
    assert after.rows("ranks")[0]["signal"] == 9
    assert after.sources == before.sources
    assert "exits.jsonl" in {source.path for source in after.sources}
    (run / "tables" / "steps.parquet").write_bytes(b"PAR1 cut")
    assert store.read_run(run).tables["steps"].num_rows == 0


def test_spawned_ranks_are_seen_and_their_exception_too(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import torch, torch.distributed as dist, torch.multiprocessing as mp

            def work(rank):
                dist.init_process_group(
                    "gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2
                )
                dist.all_reduce(torch.ones(3))
                if rank == 1:
                    raise KeyError("no such shard")

            if __name__ == "__main__":
                mp.spawn(work, args=(), nprocs=2)
        """)
    )
    run = tmp_path / "run"
    done = launch(run, sys.executable, str(script), str(tmp_path / "store"))
    assert done.returncode == 1
    assert "no such shard" in done.stderr
    collected = store.read_run(run)
    rows = collected.rows("ranks")
    assert [r["rank"] for r in rows] == [0, 1]
    assert rows[1]["exception"] == "builtins.KeyError: 'no such shard'"
    assert "work" in rows[1]["traceback"]
    assert [(r["rank"], r["op"]) for r in collected.rows("collectives")] == [
        (0, "all_reduce"),
        (1, "all_reduce"),
    ]


def test_a_job_of_one_process_and_its_surroundings(tmp_path: Path) -> None:
    """No group at all; a forked child, the job's own sitecustomize and `collectors` stay intact."""
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'kept'\n")
    (tmp_path / "collectors.py").write_text("MINE = True\n")
    script = tmp_path / "alone.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys
            import torch, collectors
            assert collectors.MINE and mine == "kept"
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                for micro in range(2):
                    model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                if os.fork() == 0:
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                    os._exit(0)
                os.wait()
            sys.exit(3)
        """)
    )
    run = tmp_path / "run"
    done = launch(run, sys.executable, str(script), PYTHONPATH=str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    collected = store.read_run(run)
    assert [r["rank"] for r in collected.rows("ranks")] == [0]
    assert [r["step"] for r in collected.rows("steps") if r["end_ns"]] == [0, 1, 2]
    kinds = [(r["phase"], r["microbatch"]) for r in collected.rows("phases") if r["step"] == 1]
    assert kinds == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("optimizer", None),
    ]  # fmt: skip


def test_a_run_directory_that_cannot_be_written_only_costs_the_record(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import torch\ntorch.ones(1, requires_grad=True).sum().backward()\nprint(7)")
    blocked = tmp_path / "run"
    blocked.mkdir()
    (blocked / "ranks").write_text("a file where the directory should be")
    done = launch(blocked, sys.executable, str(script))
    assert (done.returncode, done.stdout) == (0, "7\n")
    assert done.stderr.count("\n") == 1
    assert "not watched" in done.stderr


def test_what_jobs_do_with_their_models_still_works(tmp_path: Path) -> None:
    """Compiled, copied, saved and scripted models; a module of the job called `statistics`; a job
    that closes all descriptors; one that owns a package called `collectors`."""
    (tmp_path / "statistics.py").write_text("median = None\n")
    (tmp_path / "collectors").mkdir()
    (tmp_path / "collectors" / "__init__.py").write_text("")
    (tmp_path / "collectors" / "annotate.py").write_text("def listen(x): raise SystemExit(9)\n")
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
            import copy, io, os, pickle
            import torch
            import collectors.annotate
            plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
            model = torch.compile(plain, backend="aot_eager", fullgraph=True)
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                if step == 3:
                    copy.deepcopy(plain), pickle.dumps(plain), torch.jit.script(plain)
                    torch.save(plain, io.BytesIO())
                    os.closerange(3, 256)
                    kept = [open(os.devnull) for _ in range(6)]
            print("done", torch._dynamo.utils.counters["stats"]["unique_graphs"])
        """)
    )
    run = tmp_path / "run"
    done = launch(run, sys.executable, "-W", "ignore", str(script))
    assert (done.returncode, done.stdout) == (0, "done 1\n"), done.stderr
    assert "diag" not in done.stderr
    collected = store.read_run(run)
    assert [r["step"] for r in collected.rows("steps") if r["end_ns"]] == list(range(6))
    kinds = [r["phase"] for r in collected.rows("phases") if r["step"] == 4]
    assert kinds == ["forward", "backward", "optimizer"]


def test_a_tool_that_a_rank_starts_is_not_the_rank(tmp_path: Path) -> None:
    tool = (
        "import torch, torch.distributed as d; "
        "d.init_process_group('gloo', init_method='file://' + __import__('sys').argv[1], rank=0, "
        "world_size=1); torch.ones(1, requires_grad=True).sum().backward(); "
        "d.destroy_process_group()"
    )
    script = tmp_path / "job.py"
    script.write_text(
        "import subprocess, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        f"tool, store = {tool!r}, {str(tmp_path / 'store')!r}\n"
        "subprocess.run([sys.executable, '-c', tool, store], check=True)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    run = tmp_path / "run"
    done = torchrun(run, 1, str(script))
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (run / "ranks").iterdir()] == ["00000"]
