"""The engine as a whole: one answer, the same for any order of rows, never a traceback."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playbooks_jobs import GLOO_CLOSED, START, Job, at, ddp, mesh

from collectors import schema
from collectors.annotate import PHASES
from collectors.collected import Collected, empty
from playbooks import engine, joining, knowledge
from playbooks.engine import diagnose
from playbooks.evidence import Evidence
from playbooks.finding import Finding
from playbooks.policy import Policy


def broken() -> Job:
    job = ddp(steps=12, slow={1: 60.0}, since=2)
    job.died(3, 1500, signal=9)
    job.raised(0, 1490, GLOO_CLOSED)
    job.raised(2, 1495, GLOO_CLOSED)
    job.failed()
    return job


@pytest.mark.parametrize("job", [ddp(), mesh(slow=1, since=4), broken(), ddp(data=70.0)])
def test_the_order_of_rows_decides_nothing(job: Job) -> None:
    first = diagnose(job.collected()).as_json()
    for seed in range(4):
        other = diagnose(job.collected(shuffle=seed)).as_json()
        for part in ("verdict", "findings", "health", "abstained"):
            assert other[part] == first[part], f"seed {seed}: {part}"


def test_a_stopped_job_has_no_slow_root() -> None:
    report = diagnose(broken().collected())
    assert report.verdict is not None
    assert report.verdict.cause == "hang.rank-died"
    assert {f.cause: f.role for f in report.findings}["slow.straggler-compute"] == "context"
    # What follows from the straggler is not explained by the death.
    assert {f.cause: f.role for f in report.findings}["slow.comm-exposed"] == "context"


def test_nothing_at_all_abstains() -> None:
    report = diagnose(empty())
    assert report.abstained is not None
    assert report.abstained.need


def test_a_live_job_is_healthy_so_far() -> None:
    job = ddp(steps=6)
    job.run.update(state="running", exit_code=None)
    report = diagnose(job.collected())
    assert report.health is not None
    assert report.health.summary.startswith("The job runs")
    assert report.health.numbers["steps"] == 6


def test_exit_code_0_without_anything_seen_is_not_health() -> None:
    job = Job(0)
    report = diagnose(job.collected())
    assert report.abstained is not None
    assert "exit code 0" in report.abstained.because


def test_a_failed_job_without_a_word_abstains() -> None:
    job = ddp(steps=4)
    job.failed(3)
    report = diagnose(job.collected())
    assert report.abstained is not None
    assert "exit code 3" in report.abstained.because


def test_complete_dumps_of_all_ranks_are_healthy() -> None:
    job = Job(2, loose=True)
    group = job.group("world", 0, 1)
    for rank in range(2):
        for seq in range(5):
            job.call(rank, group, seq, 10 * seq, 10 * seq + 5)
    assert diagnose(job.collected()).health is not None


def test_a_root_gets_the_advice_of_the_taxonomy_and_its_title() -> None:
    report = diagnose(broken().collected())
    assert report.verdict is not None
    known = knowledge.cause("hang.rank-died")
    assert report.verdict.advice == known.advice
    assert report.titles["hang.rank-died"] == known.title


def finding(cause: str, ms: float | None, confidence: str = "certain") -> Finding:
    return Finding(
        cause,
        "root",
        confidence,  # type: ignore[arg-type]
        cause,
        at_ns=None if ms is None else at(ms),
    )


CRASH, DIED, MISMATCH = "crash.user-exception", "hang.rank-died", "hang.collective-mismatch"
SLOW, PLACED, OOM = "slow.straggler-compute", "link.tp-crosses-nodes", "oom.oversized-request"


@pytest.mark.parametrize(
    ("pair", "first"),
    [
        # Why it ended comes before that it ended; polling sees ends up to two seconds late.
        (((CRASH, 1000), (DIED, 900)), CRASH),
        (((CRASH, 9000), (DIED, 900)), DIED),
        (((MISMATCH, 100), ("crash.native-fault", 500)), MISMATCH),
        (((OOM, 100), (MISMATCH, 300)), OOM),
        ((("hang.rank-stalled", 100), (SLOW, 1)), "hang.rank-stalled"),
        (((PLACED, None), (DIED, 500)), DIED),
        (((SLOW, 1), (PLACED, None)), SLOW),
    ],
)
def test_precedence(pair: tuple[tuple[str, float], tuple[str, float]], first: str) -> None:
    roots = [finding(*one) for one in pair]
    for order in (roots, roots[::-1]):
        chosen = joining.choose(order, Policy())
        assert chosen is not None
        assert chosen.cause == first


def test_a_guess_never_beats_knowledge() -> None:
    roots = [finding("oom.activations", 1, "possible"), finding("hang.rank-died", 5000)]
    chosen = joining.choose(roots, Policy())
    assert chosen is not None
    assert chosen.cause == "hang.rank-died"


_times = st.one_of(st.none(), st.integers(START, START + 10**10))
_small = st.one_of(st.none(), st.integers(-2, 5))
_texts = {
    "phase": st.sampled_from([*PHASES, "odd", None]),
    "op": st.sampled_from(["all_reduce", "send", "recv", "gather", "", None]),
    "state": st.sampled_from(["issued", "started", "completed", "failed", "?", None]),
    "group_id": st.sampled_from(["a", "b", None]),
    "exception": st.sampled_from([None, "KeyError: 1", GLOO_CLOSED, "\x1b[31mOutOfMemoryError: x"]),
    "fields": st.sampled_from([None, "{}", "[1]", "not json", '{"pid": "x", "fingerprints": 3}']),
    "kind": st.sampled_from(
        ["python.exception", "elastic.failure", "kernel.oom-killed", "x", None]
    ),
}


def _column(column: schema.Column) -> st.SearchStrategy[object]:
    if column.name in _texts:
        return _texts[column.name]
    if column.name.endswith("_ns"):
        return _times
    by_type = {
        "int64": _small,
        "float64": st.one_of(st.none(), st.floats(0, 1e6)),
        "bool": st.one_of(st.none(), st.booleans()),
        "string": st.sampled_from([None, "a", "<b>&\x1b]0;x\x07"]),
        "list<int64>": st.one_of(st.none(), st.lists(st.integers(0, 4), max_size=4)),
        "list<string>": st.one_of(st.none(), st.lists(st.just("f (x.py:1)"), max_size=2)),
    }
    return by_type[column.dtype]


@st.composite
def piles(draw: st.DrawFn) -> Collected:
    """Tables of any nonsense that the schema allows."""
    out = empty()
    for name, columns in schema.TABLES.items():
        row = st.fixed_dictionaries({c.name: _column(c) for c in columns})
        out.tables[name] = schema.table(name, draw(st.lists(row, max_size=5)))
    out.world_size = draw(st.one_of(st.none(), st.integers(1, 6)))
    if draw(st.booleans()):
        out.run = {
            "state": draw(st.sampled_from(["running", "finished"])),
            "exit_code": draw(st.sampled_from([None, 0, 1])),
            "interrupted": draw(st.booleans()),
            "hangs": draw(
                st.sampled_from([[], [{}], [{"since_ns": START, "detected_ns": START + 9}]])
            ),
        }
    return out


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(piles())
def test_any_tables_give_exactly_one_well_formed_answer(collected: Collected) -> None:
    from playbooks.report import html, markdown, text

    report = diagnose(collected)
    shown = json.loads(json.dumps(report.as_json(), allow_nan=False))
    answers = [shown[key] for key in ("verdict", "abstained", "health")]
    assert sum(a is not None for a in answers) == 1
    known = knowledge.causes()
    for one in shown["findings"]:
        assert one["cause"] in known
        assert one["role"] in ("root", "effect", "context")
        assert one["confidence"] in ("certain", "likely", "possible")
    if shown["verdict"] is not None:
        assert shown["findings"][0]["role"] == "root"
        assert shown["verdict"]["advice"]
        assert shown["verdict"]["evidence"] or shown["verdict"]["cause"].startswith("link.")
    for page in (text.render(report), markdown.render(report), html.render(report, collected)):
        assert "\x1b" not in page
        assert "\x07" not in page


def large(ranks: int = 8, each: int = 125_000) -> Collected:
    """A million operations, as arrow columns."""
    job = ddp(ranks, steps=each // 100)
    out = job.collected()
    total = ranks * each
    number = np.tile(np.arange(each), ranks)
    rank = np.repeat(np.arange(ranks), each)
    issue = START + number * 1_000_000 + rank * 1000
    columns = {
        "rank": rank,
        "group_id": np.full(total, "dp[0..7]"),
        "seq": number,
        "op": np.full(total, "all_reduce"),
        "dtype": np.full(total, "float32"),
        "shape": np.full(total, "[128]"),
        "bytes_in": np.full(total, 512),
        "issue_ns": issue,
        "end_ns": issue + 500_000,
        "state": np.full(total, "completed"),
        "step": number // 100,
    }
    out.tables["collectives"] = schema.table_from_columns("collectives", columns, total)
    return out


def test_a_million_operations_are_no_trouble() -> None:
    """Prints the time; what is asserted is that the answer is complete."""
    collected = large()
    start = time.perf_counter()
    report = engine.diagnose(collected)
    print(f"\n1,000,000 operations diagnosed in {time.perf_counter() - start:.2f} s")
    assert report.metrics["collectives"] == 1_000_000
    assert report.health is not None


def test_what_only_prose_tells_is_at_most_possible_and_outvotes_nothing() -> None:
    """Readings of a program's own words have been right about every second time."""
    told = Finding("numeric.shards-overlap", "root", "likely", "Ranks print the same samples.")
    sure = Finding("slow.gpu-throttled", "root", "likely", "A GPU is held down.")
    for loose, confidence in ((True, "possible"), (False, "likely")):
        evidence = Evidence(Job(2, loose=loose).collected())
        verdict, _ = joining.join([told], evidence, Policy())
        assert verdict is not None
        assert verdict.confidence == confidence
    verdict, _ = joining.join([told, sure], Evidence(Job(2, loose=True).collected()), Policy())
    assert verdict is not None
    assert verdict.cause == sure.cause
