"""`diag demo` tells the truth about whether the verdict was right, and the verdicts are right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from diag import demo
from diag.commands.demo import _layout as _sizes

if TYPE_CHECKING:
    from pathlib import Path

SEED = 1


def _run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diag", "demo", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )


def _placed(name: str) -> demo.Placed:
    return demo.place(demo.CASES[name], {"tp": 2, "pp": 2}, SEED)


def test_a_place_is_a_function_of_the_seed_and_within_the_world() -> None:
    assert _placed("oom") == _placed("oom")
    many = [demo.place(demo.CASES["oom"], {"dp": 2, "tp": 4}, seed) for seed in range(200)]
    assert {p.rank for p in many} == set(range(8))
    assert {p.world for p in many} == {8}
    assert len({p.step for p in many}) > 1


@pytest.mark.parametrize("case", demo.CASES.values(), ids=list(demo.CASES))
def test_every_case_can_be_on_the_layout_that_it_has_by_default(case: demo.Case) -> None:
    for seed in range(4):
        placed = demo.place(case, _sizes(case.layout or demo.LAYOUT), seed)
        assert demo.refused(placed) == []
        assert case.rank is None or placed.rank == case.rank


def test_a_layout_with_experts_or_three_replicas_gets_a_model_and_batch_that_fit() -> None:
    for layout in ({"dp": 2, "ep": 2}, {"dp": 3}, {"pp": 2, "cp": 2}):
        placed = demo.place(demo.CASES["healthy"], layout, SEED)
        assert demo.refused(placed) == []
    assert demo.place(demo.CASES["healthy"], {"dp": 2, "ep": 2}, SEED).world == 2


def test_a_rank_that_no_record_tells_must_not_be_named() -> None:
    placed = _placed("nan")
    for ranks, right in (([], True), ([placed.rank], False)):
        verdict = {"cause": "numeric.nan", "ranks": ranks, "confidence": "likely"}
        assert demo.hold(placed, {"verdict": verdict, "health": None}, {}).right is right


@pytest.mark.parametrize(
    ("name", "verdict", "right"),
    [
        ("oom", {"cause": "oom.oversized-request", "ranks": "true"}, True),
        ("oom", {"cause": "oom.oversized-request", "ranks": "other"}, False),
        ("oom", {"cause": "oom.oversized-request", "ranks": []}, False),
        ("oom", {"cause": "oom.activations", "ranks": "true"}, False),
        ("oom", None, False),
        ("healthy", None, True),
        ("healthy", {"cause": "slow.data-bound", "ranks": []}, False),
        ("bad-topology-plan", {"cause": "link.tp-crosses-nodes", "ranks": []}, True),
    ],
)
def test_a_wrong_cause_or_a_wrong_rank_is_wrong(name: str, verdict: Any, right: bool) -> None:
    placed = _placed(name)
    if verdict and isinstance(verdict["ranks"], str):
        there = placed.rank if verdict["ranks"] == "true" else placed.rank + 1
        verdict = {**verdict, "ranks": [there]}
    answer = {"verdict": verdict and {**verdict, "confidence": "likely"}, "health": None}
    if name == "healthy" and verdict is None:
        answer["health"] = {"summary": "fine"}
    assert demo.hold(placed, answer, {}).right is right


def test_list_and_unknown_names(tmp_path: Path) -> None:
    listed = _run(tmp_path, "--list")
    assert all(name in listed.stdout for name in demo.CASES)
    unknown = _run(tmp_path, "stragler")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "straggler" in unknown.stderr
    assert unknown.stderr.count("\n") == 1


@pytest.mark.ranks
@pytest.mark.parametrize("name", list(demo.CASES))
def test_the_verdict_names_the_fault(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = _run(tmp_path, name, "--run-dir", str(run), "--seed", str(SEED))
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((run / "report.json").read_text())
    if name == "healthy":
        assert answer["health"]["numbers"]
        assert answer["metrics"]["step_time_s"]
        return
    verdict = answer["verdict"]
    assert verdict["cause"] == demo.CASES[name].cause
    assert verdict["evidence"]
    assert verdict["advice"]
    assert all(item["source"] and item["locator"] for item in verdict["evidence"])
    roots = {f["cause"] for f in answer["findings"] if f["role"] == "root"}
    assert roots == {verdict["cause"]}
    html = (run / "report.html").read_text()
    assert verdict["cause"] in html
    assert not re.search(r"(src|href)=[\"']?https?:", html)
    if name == "rank-stalls":
        facts = json.loads((run / "run.json").read_text())
        hang = facts["hangs"][0]
        looks = sorted((run / hang["capture"]).glob("stacks-*.json"))
        assert len(looks) == 2
        assert all(len(json.loads(look.read_text())["ranks"]) == 4 for look in looks)


def test_a_layout_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = _run(tmp_path, "--layout", "tp=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "heads" in done.stderr
