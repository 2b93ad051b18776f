"""A wrong configuration is refused at once, with every reason and what to type instead."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from trainer.config import Config, ConfigError
from trainer.layout import Layout, legal, microbatches, resolve
from trainer.parity import cases
from trainer.parity.matrix import matrix
from trainer.parity.proof import ranks_of
from trainer.settings import load, usage
from trainer.split import even

SMALL = str(Path(__file__).parents[2] / "trainer/configs/small.toml")


def refused(*arguments: str, world: int = 4) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(list(arguments), world)
    return caught.value.problems


def test_arguments_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\nsteps = 7\nseed = 3\n[mesh]\norder = ["tp", "dp", "pp"]\n')
    config = load(["--config", str(file), "train.steps=9", "optim.lr=1"], 1)
    assert (config.train.steps, config.train.seed, config.optim.lr) == (9, 3, 1.0)
    assert config.mesh.order == ("tp", "dp", "pp")
    assert load(["mesh.order=dp,tp,pp"], 1).mesh.order == ("dp", "tp", "pp")
    assert load(["data.path=3"], 1).data.path == "3"


def test_small_config_fits_every_layout_of_four_ranks() -> None:
    for layout in ("dp=4", "tp=4", "pp=4"):
        assert resolve(load(["--config", SMALL, f"parallel.{layout}"], 4), 4).world == 4
    config = load(["--config", SMALL, "parallel.tp=2", "parallel.pp=2"], 4)
    assert resolve(config, 4) == Layout(dp=1, tp=2, pp=2)
    assert microbatches(config, Layout(dp=1, tp=2, pp=2)) >= 4


def test_the_bundled_experts_fit_four_ranks() -> None:
    config = load(["--config", SMALL.replace("small", "moe")], 4)
    assert resolve(config, 4) == Layout(dp=4, tp=1, pp=1, ep=2)
    assert config.model.experts > config.model.top_k > 1


def test_unknown_keys_name_the_nearest() -> None:
    found = refused("parallel.tpp=2", "modle.heads=4", "train.stepz=3", "zzz=1")
    assert "parallel.tpp; did you mean parallel.tp?" in found[0]
    assert "modle.heads; did you mean model.heads?" in found[1]
    assert "train.stepz; did you mean train.steps?" in found[2]
    assert "zzz" in found[3]


def test_all_problems_at_once() -> None:
    found = refused(
        "train.steps=many",
        "train.dtype=float23",
        "model.norm=rms",
        "faults.kind=rank-dead",
        "optim.lr=true",
        "--verbose",
        "mesh.order=[1,{a=2}]",
    )
    text = "\n".join(found)
    assert "train.steps=many must be a whole number" in text
    assert "did you mean train.dtype=float32?" in text or "train.dtype=float64?" in text
    assert "did you mean model.norm=rmsnorm?" in text
    assert "did you mean faults.kind=rank-dies?" in text
    assert "optim.lr=True must be a number" in text
    assert "--verbose" in text


def test_values_out_of_range_are_all_named() -> None:
    found = refused(
        "train.steps=0", "optim.beta1=1.5", "optim.lr=nan", "faults.kind=oom", "faults.rank=4"
    )
    text = "\n".join(found)
    for words in (
        "train.steps=0 must be more than 0",
        "optim.beta1=1.5 must be below 1",
        "optim.lr=nan must be a finite number",
        "faults.rank=4 is not one of 4 ranks",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "world", "words"),
    [
        (("parallel.tp=3",), 4, "tp x pp = 3 x 1 = 3 does not divide 4 ranks"),
        (("parallel.dp=4", "parallel.pp=2"), 4, "= 8, but there are 4 ranks"),
        (("parallel.tp=8",), 8, "parallel.tp=8 exceeds model.kv_heads=4"),
        (("parallel.tp=4", "model.mlp=90"), 4, "does not divide model.mlp=90 (parallel.tp=2)"),
        (("parallel.pp=8",), 8, "parallel.pp=8 stages exceed model.layers=4"),
        (("train.global_batch=6", "train.microbatch=2"), 4, "(train.global_batch=8)"),
        (("model.heads=7", "model.kv_heads=7"), 1, "(model.heads=8)"),
        (("model.kv_heads=3",), 1, "model.kv_heads=3 does not divide model.heads=8"),
        (("model.width=24", "model.heads=8"), 1, "a head is 3 wide"),
        (("parallel.sp=true",), 4, "parallel.sp=true shards the sequence over tp"),
        (("parallel.sp=1",), 4, "parallel.sp=1 must be true or false"),
        (("parallel.sp=true", "parallel.tp=4", "train.sequence=30"), 4, "(train.sequence=32)"),
        (("parallel.virtual=2",), 4, "several stages a rank are interleaved"),
        (
            ("parallel.pp=1", "parallel.schedule=interleaved", "parallel.virtual=2"),
            4,
            "needs several ranks, and pp is 1",
        ),
        (
            ("parallel.pp=4", "parallel.schedule=interleaved", "parallel.virtual=2"),
            4,
            "= 8 stages exceed model.layers=4",
        ),
        (
            (
                "parallel.pp=4",
                "model.layers=8",
                "parallel.schedule=interleaved",
                "parallel.virtual=2",
                "train.global_batch=6",
                "train.microbatch=1",
            ),
            4,
            "(train.global_batch=8)",
        ),
        (("memory.checkpoint=every-0",), 1, "(memory.checkpoint=every-2)"),
        (("parallel.cp=3",), 4, "tp x pp x cp = 1 x 1 x 3 = 3 does not divide 4 ranks"),
        (("parallel.cp=2", "train.sequence=30"), 2, "(train.sequence=32)"),
        (
            ("parallel.cp=2", "parallel.tp=4", "parallel.sp=true", "train.sequence=28"),
            8,
            "does not divide train.sequence=28 / 2 (train.sequence=32)",
        ),
        (("parallel.cp=2", "mesh.order=tp,dp,pp"), 2, "must name each of pp, dp, cp, tp once"),
        (("parallel.zero=2", "parallel.tp=4"), 4, "parallel.zero=2 shares over replicas"),
        (("model.experts=4", "model.top_k=5"), 1, "(model.top_k=4 or model.experts=5)"),
        (("model.capacity=1.5",), 1, "limits experts, and model.experts is 0"),
        (("parallel.ep=2",), 4, "(parallel.ep=1 or model.experts=8)"),
        (("parallel.ep=4", "model.experts=6"), 4, "(parallel.ep=3 or model.experts=8)"),
        (("parallel.ep=4", "model.experts=8", "parallel.tp=2"), 4, "= 2 x 1 and does not divide"),
        (
            ("parallel.ep=2", "model.experts=8", "mesh.order=dp,ep,cp,tp,pp"),
            4,
            "order=dp,cp,tp,pp,ep",
        ),
        (("parallel.zero=4",), 4, "parallel.zero=4 is not one of 0, 1, 2, 3"),
        (("parallel.replicate=2",), 4, "parallel.zero=0 shares nothing"),
        (("parallel.zero=1", "parallel.replicate=4"), 4, "(parallel.replicate=2)"),
        (("parallel.zero=1", "parallel.replicate=3"), 8, "must leave at least 2 of dp x cp = 8"),
        (
            ("parallel.zero=2", "parallel.replicate=2", "parallel.ep=4", "model.experts=4"),
            4,
            "ranks that hold the same experts",
        ),
        (("memory.offload=parameters", "parallel.zero=2"), 4, "(parallel.zero=3 or memory.offload"),
        (("memory.offload=disk",), 1, "is not one of none, optimizer, parameters"),
        (("train.reduce_dtype=float16",), 2, "needs a loss scale"),
        (("scale.growth=1",), 1, "scale.growth=1 must be more than 1"),
        (("scale.backoff=1",), 1, "scale.backoff=1 must be below 1"),
        (("scale.least=4", "scale.initial=2"), 1, "scale.least=4 exceeds scale.initial=2"),
        (("mesh.order=tp,dp",), 1, "must name each of pp, dp, tp once"),
    ],
)
def test_layouts_that_cannot_work(arguments: tuple[str, ...], world: int, words: str) -> None:
    found = refused(*arguments, world=world)
    assert any(words in problem for problem in found), found
    assert all("=" in problem for problem in found), "each problem names a flag"


def test_nearest_layouts_are_legal_and_near() -> None:
    found = refused("parallel.tp=8", world=8)
    nearest = found[-1]
    assert "nearest layouts that fit 8 ranks: parallel.tp=4 parallel.pp=1 (dp=2)" in nearest
    for one in legal(load([], 1), 8):
        assert load([f"parallel.tp={one.tp}", f"parallel.pp={one.pp}"], 8)
    assert "no layout of 7 ranks fits" in refused("parallel.tp=7", world=7)[-1]


def test_nearest_layouts_share_experts_too() -> None:
    nearest = refused("model.experts=8", "parallel.ep=8", "parallel.tp=2", world=8)[-1]
    assert "parallel.tp=2 parallel.pp=1 parallel.ep=4 (dp=4)" in nearest
    for one in legal(load(["model.experts=6", "parallel.ep=2"], 8), 8):
        settings = [f"parallel.{axis}={one.size(axis)}" for axis in ("tp", "pp", "ep")]
        assert load(["model.experts=6", *settings], 8)


def test_a_problem_of_the_model_alone_is_no_problem_of_the_layout() -> None:
    assert len(refused("model.kv_heads=3", world=1)) == 1


@pytest.mark.parametrize("layers", range(1, 12))
def test_stages_share_all_layers_evenly(layers: int) -> None:
    for stages in range(1, layers + 1):
        split = even(layers, stages)
        assert [layer for stage in split for layer in stage] == list(range(layers))
        assert max(map(len, split)) - min(map(len, split)) <= 1


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[train\n", "is not TOML"), (b"\xff\xfe", "is not TOML"), (b"steps = 1\n", "outside a")],
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    found = refused("--config", str(file))
    assert len(found) == 1
    assert words in found[0]
    assert "\n" not in found[0]


def test_a_schedule_is_drawn_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.__main__ import main

    def drawn(*settings: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["trainer", "--show-schedule", *settings])
        return main(), capsys.readouterr().out.splitlines()

    batch = ("train.global_batch=4", "train.microbatch=1")
    status, lines = drawn("parallel.pp=2", "parallel.schedule=zero-bubble", *batch)
    assert status == 0
    assert lines[0] == "zero-bubble, 2 rank(s), 4 microbatches, stages of 2+2 layers"
    assert lines[1].startswith("rank 0  F0 F1    I0 W0")
    assert lines[-1].startswith("predicted bubble 7.7%")
    assert drawn("parallel.pp=2", "parallel.split=3,1", *batch)[1][-1] > "predicted bubble 20.0%"
    assert drawn("parallel.pp=9", *batch) == (2, [])


def test_usage_documents_every_key() -> None:
    text = usage()
    for section in fields(Config):
        for field in fields(type(section.default)):
            assert f"  {section.name}.{field.name}=" in text
    for line in text.splitlines():
        key, _, value = line.strip().partition("=")
        if value in {"true", "false", "True", "False"}:
            assert load([f"{key}={value}"], 1), "what --help shows can be typed"


@pytest.mark.parametrize(("rank", "lines"), [("0", 3), ("3", 0)])
def test_command_line_refuses_on_rank_0_without_a_traceback(rank: str, lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer", "parallel.tp=3"],
        env={**os.environ, "RANK": rank, "WORLD_SIZE": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [one for one in done.stderr.splitlines() if not one.startswith("import time:")]
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(said) == lines
    assert all(line.startswith("trainer: ") for line in said)
    assert "| torch" not in done.stderr, "torch was imported to refuse a configuration"


def test_unknown_keys_values_and_layout_are_refused_together() -> None:
    with pytest.raises(ConfigError) as refused:
        load(["train.stepz=1", "model.heads=x", "parallel.tp=3"], 1)
    told = "\n".join(refused.value.problems)
    assert "train.steps" in told
    assert "model.heads=x" in told
    assert "parallel.tp=3" in told


def test_every_layout_of_the_parity_matrix_can_run() -> None:
    """One that is refused would drop out of the proof and leave the rest equal."""
    for layout in matrix():
        settings = [*cases.SMALL, *cases.FIXED, "train.dtype=float64", *layout]
        load(settings, ranks_of(settings))
