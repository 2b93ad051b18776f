"""The search keeps to what is legal and fits, tells why of the rest, and climbs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from trainer.config import Config, MemoryConfig, ModelConfig, ParallelConfig, TrainConfig
from trainer.layout import problems
from trainer.planner import memory
from trainer.planner.candidate import Candidate, Job, Rejected
from trainer.planner.cluster import GPUS, Cluster
from trainer.planner.explain import explain
from trainer.planner.ladder import ladder
from trainer.planner.legal import reasons
from trainer.planner.presets import PRESETS
from trainer.planner.search import judge, room, search


def _job(model: str = "llama3-70b", gpus: int = 64, batch: int = 512) -> Job:
    return Job(PRESETS[model], Cluster(GPUS["h100"], gpus), 8192, batch)


def test_every_layout_that_is_ranked_fits_and_every_other_says_why() -> None:
    job = _job()
    found = search(job)
    assert found.ranked
    for one in found.ranked:
        assert not reasons(job, one.candidate)
        assert one.peak <= room(job)
        assert one.timing.step > 0
    assert found.rejected
    assert all(one.reasons and all(one.reasons) for one in found.rejected)
    steps = [one.timing.step for one in found.ranked]
    assert all(after > before * 0.98 for before, after in itertools.pairwise(steps))


def test_more_than_10000_layouts_of_4096_gpus_are_judged() -> None:
    """Sequences of 32k leave more room for cp."""
    job = replace(_job("llama3-405b", 4096, 4096), sequence=32768)
    found = search(job)
    assert found.tried > 10_000
    assert found.ranked


def test_all_reasons_are_told_at_once() -> None:
    job = _job()
    one = Candidate(dp=3, tp=16, pp=100, cp=5, ep=2, microbatch=7)
    told = "; ".join(reasons(job, one))
    for part in ("there are 64 GPUs", "global batch 512", "8 key and value heads", "exceed 80",
                 "sequence 8192", "has none", "leaves the 8 GPUs"):  # fmt: skip
        assert part in told


def test_nothing_fits_one_gpu_and_each_says_how_much_is_too_much() -> None:
    found = search(_job(gpus=1, batch=1))
    assert not found.ranked
    assert all("GiB" in one.reasons[0] for one in found.rejected)


def test_what_is_fixed_stays() -> None:
    found = search(_job(), {"tp": 8, "pp": 2, "zero": 1})
    assert {(r.candidate.tp, r.candidate.pp, r.candidate.zero) for r in found.ranked} == {(8, 2, 1)}


def test_the_trainer_accepts_what_the_planner_calls_legal() -> None:
    """One set of rules: a layout of the search must not be refused by the trainer."""
    shape = PRESETS["llama3-8b"]
    job = Job(shape, Cluster(GPUS["h100"], 16), 4096, 64)
    model = ModelConfig(
        vocabulary=shape.vocabulary, layers=shape.layers, width=shape.width, heads=shape.heads,
        kv_heads=shape.kv_heads, mlp=shape.mlp,
    )  # fmt: skip
    found = search(job)
    seen = set()
    for one in (ranked.candidate for ranked in found.ranked):
        mesh = (one.dp, one.tp, one.pp, one.cp, one.zero, one.virtual, one.microbatch)
        if mesh in seen:
            continue
        seen.add(mesh)
        config = Config(
            model=model,
            train=TrainConfig(global_batch=64, microbatch=one.microbatch, sequence=4096),
            parallel=ParallelConfig(
                dp=one.dp, tp=one.tp, pp=one.pp, cp=one.cp, sp=one.sp, zero=one.zero,
                virtual=one.virtual, schedule=one.schedule,
            ),
            memory=MemoryConfig(checkpoint=(one.checkpointing,)),
        )  # fmt: skip
        assert problems(config, 16) == []
    assert len(seen) > 50


def test_a_ladder_changes_one_thing_a_rung_and_ends_at_the_top() -> None:
    job = _job("llama3-405b", 512, 256)
    top = search(job, {"tp": 8, "pp": 8}).ranked[0].candidate
    rungs = ladder(job, top)
    assert not rungs[0].fits
    assert rungs[-1].candidate == top
    assert rungs[-1].fits
    for before, after in itertools.pairwise(rungs):
        changed = {
            name
            for name in ("zero", "checkpointing", "ep", "tp", "pp", "virtual", "cp")
            if getattr(before.candidate, name) != getattr(after.candidate, name)
        }
        assert len(changed) == 1
    order = [rung.change.partition("=")[0] for rung in rungs[1:]]
    assert order.index("zero") < order.index("tp") < order.index("pp")


def test_each_number_has_a_formula_and_a_source() -> None:
    job = _job()
    one = search(job, {"tp": 8, "pp": 2}).ranked[0].candidate
    told = {entry.name: entry for entry in explain(job, one)}
    assert {"parameter", "optimizer", "activation", "bubble", "step time", "MFU"} <= told.keys()
    assert all(entry.formula and entry.source and entry.value for entry in told.values())


@pytest.mark.parametrize("missing", ["1f1b", "naive", "gpipe", "zero-bubble"])
def test_a_schedule_may_be_asked_for(missing: str) -> None:
    found = search(_job(), {"schedule": missing, "pp": 4, "tp": 4})
    assert {one.candidate.schedule for one in found.ranked} <= {missing}
    assert found.tried


def test_a_reject_for_memory_names_its_stage_and_what_is_large() -> None:
    judged = judge(_job(), Candidate(dp=8, tp=4, sp=True, pp=2))
    assert isinstance(judged, Rejected)
    assert "stage" in judged.reasons[0]
    assert "optimizer" in judged.reasons[0]
    assert judged.peak == memory.peak(_job(), judged.candidate)[0]
