"""`diag plan` ranks what fits; its JSON, files and exit codes are what scripts use."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner, Result

from collectors.topology.plan import parse_plan
from diag.cli import group
from trainer.config import ConfigError
from trainer.settings import load

if TYPE_CHECKING:
    from pathlib import Path

BASE = ["--model", "llama3-8b", "--gpus", "16", "--gpu", "h100", "--seq", "2048"]
ASKED = [*BASE, "--global-batch", "64"]
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip


def _plan(*words: str) -> Result:
    return CliRunner().invoke(group, ["plan", *words], standalone_mode=False)


def _json(*words: str) -> dict[str, Any]:
    result = _plan(*words, "--format", "json")
    told: dict[str, Any] = json.loads(result.output)
    return told


def test_json_is_the_contract() -> None:
    told = _json(*ASKED)
    assert told["schema"] == "diag.plan/1"
    assert told["model"]["parameters"] == 8_030_261_248
    assert told["configs"]
    for one in told["configs"]:
        sizes = one["memory"]
        assert {"dp", "zero", "tp", "sp", "pp", "cp", "ep", "microbatch", "microbatches",
                "schedule", "checkpointing"} <= one["layout"].keys()  # fmt: skip
        assert {"parameter", "gradient", "optimizer", "activation", "logits", "communication",
                "overhead"} == sizes["by_category"].keys()  # fmt: skip
        assert sizes["peak_bytes"] == pytest.approx(sum(sizes["by_category"].values()), rel=1e-6)
        assert sizes["peak_bytes"] == max(stage["peak_bytes"] for stage in sizes["by_stage"])
        assert len(sizes["by_stage"]) == one["layout"]["pp"]
        low, high = one["step_time_range_s"]
        assert low < one["step_time_s"] < high
        assert one["mfu_range"][0] < one["mfu"] < one["mfu_range"][1] < 1
        assert one["tokens_per_s"] == pytest.approx(64 * 2048 / one["step_time_s"])
        assert one["fits"] is True
        assert "GiB free" in one["why"]
    assert all(one["reasons"] for one in told["rejected"])


def test_a_person_reads_a_table_and_why() -> None:
    told = _plan(*ASKED).output
    for part in ("layouts fit", "tokens/s/GPU", "why 1", "not ", "GiB"):
        assert part in told
    assert all(len(line) <= 120 for line in told.splitlines())


@pytest.mark.parametrize("form", ["md", "html"])
def test_other_forms_say_the_same(form: str) -> None:
    assert "layouts fit" in _plan(*ASKED, "--format", form).output


def test_nothing_fits_is_exit_1_and_says_what_is_missing() -> None:
    result = _plan("--model", "llama3-405b", "--gpus", "8", "--gpu", "a100", "--seq", "8192",
                   "--global-batch", "8")  # fmt: skip
    assert result.return_value == 1
    assert "nothing fits" in result.output
    assert "GiB" in result.output


def test_ladder_and_formulas() -> None:
    told = _json(*ASKED, "--ladder", "--explain", "--fix", "tp=2 zero=3")
    assert [one["change"] for one in told["ladder"]][:2] == ["plain data parallelism", "zero=1"]
    assert told["ladder"][-1]["fits"]
    assert any("1910.02054" in one["source"] for one in told["formulas"])
    text = _plan(*ASKED, "--ladder", "--explain").output
    assert "ladder: one change at a time" in text
    assert "arXiv:2205.05198" in text


def test_the_plan_file_is_one_that_topo_takes(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    result = _plan(*ASKED, "--fix", "tp=8", "-o", str(path))
    assert "layouts fit" in result.output
    plan = parse_plan(yaml.safe_load(path.read_text()))
    assert plan.world == 16
    assert plan.sizes["tp"] == 8


def test_the_trainer_takes_its_config(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    _plan(*ASKED, "--fix", "tp=4 pp=2 cp=2", "-o", str(path))
    config = load(["--config", str(path)], 16)
    assert (config.parallel.tp, config.parallel.pp, config.parallel.cp) == (4, 2, 2)
    assert config.model.width == 4096
    with pytest.raises(ConfigError):
        load(["--config", str(path)], 8)


def test_a_model_that_the_trainer_has_not_is_refused_as_its_config(tmp_path: Path) -> None:
    words = ["--model", "gpt3-175b", "--gpus", "256", "--gpu", "h100", "--seq", "2048"]
    result = _plan(*words, "--global-batch", "256", "-o", str(tmp_path / "best.toml"))
    assert "the trainer cannot have this layout" in str(result.exception)


def test_megatron_arguments(tmp_path: Path) -> None:
    path = tmp_path / "args"
    _plan(*ASKED, "--fix", "tp=4 pp=2 zero=1", "--write", "megatron", "-o", str(path))
    words = path.read_text().split()
    for flag, value in (("--tensor-model-parallel-size", "4"), ("--num-query-groups", "8"),
                        ("--pipeline-model-parallel-size", "2"), ("--ffn-hidden-size", "14336"),
                        ("--global-batch-size", "64")):  # fmt: skip
        assert words[words.index(flag) + 1] == value
    assert {"--use-distributed-optimizer", "--sequence-parallel", "--swiglu", "--bf16"} <= {*words}


def test_deepspeed_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ds"
    words = ["--write", "deepspeed", "-o", str(path), "--fix"]
    _plan(*ASKED, *words, "tp=1 pp=1 cp=1 ep=1")
    told = json.loads(path.read_text())
    assert told["train_batch_size"] == 64
    steps = told["gradient_accumulation_steps"]
    assert told["train_micro_batch_size_per_gpu"] * steps * 16 == 64
    assert told["zero_optimization"]["stage"] > 0
    assert "has no tp" in str(_plan(*ASKED, *words, "tp=2").exception)


def test_hf_config_is_the_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    told = _json(*ASKED, "--model", str(path))
    assert told["model"]["parameters"] == 8_030_261_248


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a config.json"),
        ("[]", "holds an object"),
        ("{}", "hidden_size or n_embd is missing"),
        (json.dumps(LLAMA | {"hidden_size": -4}), "hidden_size=-4 is no size"),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**9}), "is no size"),
        ("[" * 200_000, "not a config.json"),
    ],
)
def test_a_file_that_is_no_model_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = _plan(*ASKED, "--model", str(path))
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)


def test_the_trainers_toml_is_a_model_with_its_batch() -> None:
    told = _json("--model", "trainer/configs/moe.toml", "--gpus", "4", "--gpu", "a100")
    assert told["sequence"] == 64
    assert told["dtype"] == "trainer-fp32"
    assert any(one["layout"]["ep"] > 1 for one in told["configs"] + told["rejected"])


def test_a_topology_counts_instead_of_the_data_sheet(tmp_path: Path) -> None:
    lines = ["\t" + "\t".join([f"GPU{i}" for i in range(4)])]
    lines += [f"GPU{i}\t" + "\t".join("X" if i == j else "NV4" for j in range(4)) for i in range(4)]
    path = tmp_path / "topo.txt"
    path.write_text("\n".join(lines) + "\n")
    told = _json(*ASKED, "--topology", str(path))
    assert told["cluster"]["gpus_per_node"] == 4
    assert told["cluster"]["topology"] == str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*ASKED, "--write", "plan"], "needs -o FILE"),
        (BASE, "--global-batch N is needed"),
        (["--model", "llama3-8b"], "--gpus N, --seq N, --global-batch N, --gpu KIND"),
        ([*ASKED, "--model", "lama9"], "neither a file nor one of"),
        ([*ASKED, "--gpu", "voodoo2"], "not one of v100"),
        ([*ASKED, "--fix", "tpp=2"], "axis=value is needed"),
        ([*ASKED, "--fix", "tp=x"], "a whole number is needed"),
        ([*ASKED, "--fix", "schedule=best"], "one of naive"),
        ([*ASKED, "--gpus", "99999999"], "from 1 to"),
    ],
)
def test_bad_usage_is_one_line_that_says_what_to_type(words: list[str], said: str) -> None:
    result = _plan(*words)
    assert said in str(result.exception)


def test_it_never_imports_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from diag.cli import group\n"
        f"CliRunner().invoke(group, ['plan', *{ASKED!r}, '--explain', '--ladder'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
