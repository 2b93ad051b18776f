"""Parameters of presets are those of the published weights; all memory stands on them."""

from __future__ import annotations

import pytest

from trainer.planner.presets import PRESETS, named

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt3-175b": 174_604_259_328,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_exact(name: str) -> None:
    assert PRESETS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("spelled", ["Llama 3 8B", "llama-3-8b", "Llama-3.1-8B", "llama3_8b"])
def test_names_are_found_however_spelled(spelled: str) -> None:
    assert named(spelled) is PRESETS["llama3-8b"]


def test_active_parameters_of_experts() -> None:
    """37 B of DeepSeek-V3 and 13 B of Mixtral are active, as their authors say."""
    for name, active in (("deepseek-v3", 37e9), ("mixtral-8x7b", 12.9e9)):
        shape = PRESETS[name]
        met = sum(shape.products(at) for at in range(shape.layers)) + 2 * shape.output
        assert met == pytest.approx(active, rel=0.02)
