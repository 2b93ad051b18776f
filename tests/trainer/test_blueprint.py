"""A model of the user's own file: what it does not give is refused by name, what it raises told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from trainer import blueprint
from trainer.config import ConfigError
from trainer.layout import resolve
from trainer.loop import Trainer
from trainer.settings import load

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "import torch\nfrom torch import nn\n"
BARE = "def model():\n    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
WIDE = (
    "def model():\n    m = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
    "    m.width = 8\n    return m\n"
)
TIED = WIDE.replace("    m.width", "    m[1].weight = m[0].weight\n    m.width")


def file(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(HEAD + text)
    return str(path)


def refusals(told: str, world: int, *layout: str) -> list[str]:
    """What the layout asks of the file in vain."""
    config = load([f"model.file={told}", "train.device=cpu", *layout], world)
    return blueprint.problems(blueprint.draw(config), config, resolve(config, world))


@pytest.mark.parametrize(
    ("text", "layout", "why"),
    [
        (BARE, ("parallel.pp=2",), "parallel.pp=2 makes 2 stages, but mine.py says no width"),
        (
            WIDE,
            ("parallel.pp=4", "parallel.schedule=gpipe"),
            "parallel.pp=4 makes 4 stages, but mine.py has 2 part(s) in its chain()",
        ),
        (BARE, ("parallel.tp=2",), "parallel.tp=2 needs a PLAN in mine.py: {module path: rule}"),
        (
            BARE + "PLAN = {'1': 'columns'}\n",
            ("parallel.tp=2",),
            "PLAN of mine.py: '1' has the rule 'columns'; known: entry, column, row",
        ),
        (
            BARE + "PLAN = {'head': 'column'}\n",
            ("parallel.tp=2",),
            "PLAN of mine.py names no module that the model has",
        ),
        (
            BARE + "PLAN = {'0': 'column'}\n",
            ("parallel.tp=2",),
            "PLAN of mine.py: column splits Linear, and 0 is Embedding",
        ),
        (
            BARE.replace("256)", "255)") + "PLAN = {'1': 'head'}\n",
            ("parallel.tp=2",),
            "parallel.tp=2 does not divide 255, which 1 of mine.py has",
        ),
        (
            BARE,
            ("parallel.cp=2",),
            "parallel.cp=2 works on trainer.model.Attention itself, and mine.py has none",
        ),
        (
            TIED,
            ("parallel.pp=2",),
            "parallel.pp=2 parts 0.weight and 1.weight, which are one parameter in mine.py",
        ),
        (
            BARE.replace("nn.Linear", "nn.ReLU(), nn.Linear"),
            ("parallel.dp=2",),
            "part '1' of mine.py has no parameters: join it to the part before it",
        ),
    ],
)
def test_what_the_file_does_not_give_is_refused_by_name(
    text: str, layout: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    world = 4 if "parallel.pp=4" in layout else 2
    (told,) = refusals(file(tmp_path, text), world, *layout)
    assert told.startswith(why), told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def model(:\n", "3: SyntaxError"),
        ("import no_such_module\n", "3: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def model():\n    return nn.Linear(8, width)\n", "4: NameError: name 'width' is not"),
    ],
)
def test_what_the_file_raises_is_one_line_with_its_place(
    text: str, line: str, tmp_path: Path
) -> None:
    told = file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        refusals(told, 1)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{told}:{line}")


@pytest.mark.parametrize(
    ("text", "asked", "why"),
    [
        (BARE, ":small", "has no function small"),
        ("def model():\n    return 3\n", "", "model() returns no torch.nn.Module"),
        (BARE + "PLAN = ['column']\n", "", "PLAN is not {module path: rule}, both text"),
    ],
)
def test_a_file_that_is_no_model_is_one_line(
    text: str, asked: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        refusals(file(tmp_path, text) + asked, 1)
    assert why in str(caught.value)


def test_a_model_without_a_chain_trains_as_one_part(tmp_path: Path) -> None:
    text = (
        "class Mine(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.table = nn.Embedding(256, 8)\n        self.out = nn.Linear(8, 256)\n"
        "    def forward(self, x):\n        return self.out(self.table(x))\n"
        "def model():\n    return Mine()\n"
    )
    settings = [f"model.file={file(tmp_path, text)}", "train.device=cpu", "train.sequence=16"]
    trainer = Trainer(load(settings, 1), 1, torch.device("cpu"))
    losses = [trainer.step(number).loss for number in range(4)]
    assert losses[-1] < losses[0]
    assert list(trainer.built.parameters) == ["table.weight", "out.weight", "out.bias"]
