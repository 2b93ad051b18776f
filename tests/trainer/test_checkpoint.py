"""Checkpoints of one process: what is written when, what is refused, and what a full disk does."""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from collectors import annotate
from tests.trainer.recorder import Recorder
from tests.trainer.resumed import Held, held
from trainer import __main__ as program
from trainer.checkpoint.saver import Saver
from trainer.config import ConfigError
from trainer.loop import Trainer
from trainer.place import Place
from trainer.settings import load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TINY = (
    "train.device=cpu",
    "train.steps=8",
    "train.global_batch=4",
    "train.microbatch=2",
    "train.sequence=16",
    "model.layers=2",
    "model.width=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.mlp=48",
    "checkpoint.every=2",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Run:
    """A run and what it said; it begins where its checkpoints let it."""

    def __init__(self, folder: Path, *settings: str) -> None:
        text = folder.parent / "text.txt"
        text.write_bytes(bytes(range(32, 120)) * 30)
        base = (*TINY, f"data.path={text}", f"checkpoint.folder={folder}")
        self.trainer = Trainer(load([*base, *settings], 1), 1, torch.device("cpu"))
        self.said: list[str] = []
        self.warned: list[str] = []
        self.saver = Saver(self.trainer, say=self.said.append, warn=self.warned.append)
        self.next = self.saver.resume()

    def to(self, stop: int) -> Run:
        """Run the steps before `stop`."""
        while self.next < stop:
            self.trainer.step(self.next)
            self.saver.after(self.next)
            self.next += 1
        return self

    def end(self, stop: int) -> bool:
        """Run the steps before `stop` and wait for the last checkpoint."""
        return self.to(stop).saver.close()


def same(one: Held, other: Held) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(fragment.values, other[key].values) for key, fragment in one.items()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_the_last_ones_are_kept_and_the_newest_is_resumed(folder: Path) -> None:
    first = Run(folder)
    assert first.next == 0
    assert first.end(8)
    names = ["step-00000008", "step-00000006"]
    assert (folder / "latest").read_text().split() == names
    assert sorted(one.name for one in folder.iterdir()) == ["latest", *sorted(names)]
    again = Run(folder)
    assert again.next == 8
    assert same(held(again.trainer), held(first.trainer))
    assert again.said == [f"resumed from {folder / names[0]} after 8 steps"]


def test_without_a_period_there_is_one_after_the_last_step(folder: Path) -> None:
    assert Run(folder, "checkpoint.every=0").end(8)
    assert (folder / "latest").read_text() == "step-00000008\n"


def test_a_checkpoint_holds_the_values_of_its_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while it is written, and the next one waits for it."""
    may_write = threading.Event()
    true_write = FileSystemWriter.write_data

    def late(self: FileSystemWriter, *args: Any) -> Any:
        assert may_write.wait(60)
        return true_write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", late)
    run = Run(folder, "checkpoint.every=3").to(3)
    then = held(run.trainer)
    run.to(5)
    assert not (folder / "latest").exists()
    assert not same(then, held(run.trainer))
    may_write.set()
    assert run.end(6)
    kept = Run(folder, f"checkpoint.resume={folder / 'step-00000003'}")
    assert kept.next == 3
    assert same(held(kept.trainer), then)


def test_training_waits_where_it_is_told_to(folder: Path) -> None:
    Run(folder, "checkpoint.background=false").to(2)
    assert Run(folder).next == 2


def test_what_is_half_written_is_neither_read_nor_kept(folder: Path) -> None:
    assert Run(folder).end(4)
    (folder / "step-00000002").rename(folder / ".part-step-00000006")
    (folder / ".part-latest").write_text("step-0000")
    (folder / "latest").write_text("../text\nstep-00000099\nstep-00000004\nstep-00000004/../x\n")
    assert Run(folder).next == 4
    assert sorted(one.name for one in folder.iterdir()) == ["latest", "step-00000004"]


def test_a_run_from_the_start_leaves_what_is_there(folder: Path) -> None:
    assert Run(folder).end(8)
    again = Run(folder, "checkpoint.resume=none", "train.seed=1")
    assert again.next == 0
    assert again.end(2)
    names = {one.name for one in folder.iterdir()}
    assert names == {"latest", *(f"step-0000000{n}" for n in (2, 6, 8))}
    assert Run(folder, "train.seed=1").next == 2


def test_an_earlier_one_can_be_resumed_and_its_future_is_replaced(folder: Path) -> None:
    assert Run(folder, "checkpoint.keep=4").end(8)
    asked = ("checkpoint.keep=4", f"checkpoint.resume={folder / 'step-00000004'}", "optim.lr=0.1")
    run = Run(folder, *asked)
    assert run.next == 4
    assert run.said[1:] == ["changed since: optim.lr=0.003 there, 0.1 here"]
    assert run.end(6)
    order = (folder / "latest").read_text().split()
    assert order == [f"step-0000000{n}" for n in (6, 8, 4, 2)]
    assert same(held(Run(folder, "optim.lr=0.1").trainer), held(run.trainer))


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("model.width=64", "it is another model: model.width=32 there, 64 here"),
        ("model.norm=layernorm", "it is another model: model.norm=rmsnorm there, layernorm here"),
        ("train.seed=3", "its 2 steps were over other samples: train.seed=0 there, 3 here"),
        ("train.global_batch=8", "over other samples: train.global_batch=4 there, 8 here"),
        ("train.dtype=float64", "32 float32 there and 256 x 32 float64 here"),
    ],
)
def test_what_cannot_go_on_is_refused_and_says_what_differs(
    setting: str, line: str, folder: Path
) -> None:
    Run(folder).end(2)
    with pytest.raises(ConfigError) as caught:
        Run(folder, setting)
    (problem,) = caught.value.problems
    assert str(folder / "step-00000002") in problem
    assert line in problem


@pytest.mark.parametrize("name", [".metadata", "trainer.json", "__0_0.distcp"])
def test_a_damaged_one_is_one_line(name: str, folder: Path) -> None:
    Run(folder).end(2)
    file = folder / "step-00000002" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    with pytest.raises(ConfigError) as caught:
        Run(folder)
    (problem,) = caught.value.problems
    assert "step-00000002 cannot be resumed: " in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"step": True}, {"scale": {}}, {"config": {"model": 3}}, {"schema": ""}]
)
def test_what_no_trainer_wrote_is_refused(wrong: dict[str, Any], folder: Path) -> None:
    Run(folder).end(2)
    file = folder / "step-00000002" / "trainer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    with pytest.raises(ConfigError, match=r"cannot be resumed: trainer.json does not"):
        Run(folder)


def test_the_loss_scale_goes_on(folder: Path) -> None:
    asked = ("train.dtype=float16", "scale.interval=2", "scale.initial=4")
    run = Run(folder, *asked)
    run.end(2)
    again = Run(folder, *asked)
    assert again.trainer.scale.state_dict() == run.trainer.scale.state_dict()
    assert again.trainer.scale.value == 8


def test_a_step_that_was_skipped_leaves_its_checkpoint(folder: Path) -> None:
    """Before the first update there are no moments yet."""
    asked = ("train.dtype=float16", "scale.initial=1e30", "checkpoint.every=1")
    assert Run(folder, *asked).end(1)
    again = Run(folder, *asked)
    assert again.next == 1
    assert again.trainer.scale.skipped == 1
    steps = [one.values for key, one in held(again.trainer).items() if ".step." in key]
    assert all(one == 0 for one in steps)
    assert again.end(2)


def test_a_path_that_is_no_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no whole checkpoint, which has \.metadata and"):
        Run(folder, f"checkpoint.resume={tmp_path}")


def test_a_period_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.every=2 has no folder"):
        load([*TINY], 1)


def fill(folder: Path, step: int) -> None:
    """Let the disk be full for the checkpoint after `step` steps."""
    part = folder / f".part-step-{step:08d}"
    part.mkdir()
    (part / "__0_0.distcp").symlink_to("/dev/full")


@pytest.mark.parametrize("background", ["true", "false"])
def test_on_a_full_disk_training_goes_on_and_says_so(background: str, folder: Path) -> None:
    run = Run(folder, f"checkpoint.background={background}").to(2)
    run.saver.close()
    fill(folder, 4)
    run.to(6)
    assert run.saver.close()
    (line,) = run.warned
    assert line.startswith("the checkpoint after 4 steps was not written: rank 0: No space left on")
    assert line.endswith("; the last good one is step-00000002")
    assert (folder / "latest").read_text().split() == ["step-00000006", "step-00000002"]
    assert not list(folder.glob(".part-*"))


def test_a_run_whose_last_checkpoint_failed_ends_with_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(folder)
    true_resume = Saver.resume

    def resume(self: Saver) -> int:
        first = true_resume(self)
        fill(folder, 2)
        return first

    monkeypatch.setattr(Saver, "resume", resume)
    settings = (*TINY, "train.steps=2", f"checkpoint.folder={folder}")
    monkeypatch.setattr(sys, "argv", ["trainer", *settings, f"data.path={folder.parent}"])
    assert program.main() == 1
    assert "after 2 steps was not written" in capsys.readouterr().err
    monkeypatch.setattr(Saver, "resume", true_resume)
    assert program.main() == 0
    assert program.main() == 0
    assert "nothing left to do" in capsys.readouterr().out


def test_a_resumed_run_adds_to_its_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 120)) * 30)
    told = tmp_path / "metrics.jsonl"
    told.write_text("of an earlier run")
    settings = (f"data.path={tmp_path}", f"checkpoint.folder={folder}", f"log.metrics={told}")
    for steps in (2, 4):
        monkeypatch.setattr(sys, "argv", ["trainer", *TINY, *settings, f"train.steps={steps}"])
        assert program.main() == 0
    assert [json.loads(line)["step"] for line in told.read_text().splitlines()] == [0, 1, 2, 3]


def test_saving_is_told_as_a_phase_of_its_own(folder: Path) -> None:
    heard = Recorder()
    annotate.listen(heard)
    try:
        assert Run(folder).end(2)
    finally:
        annotate.listen(None)
    assert "checkpoint" in {phase for _step, phase, _microbatch, _stage in heard.phases}
    assert heard.nested == []


def test_torchs_own_tools_read_the_whole_model(folder: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run = Run(folder)
    assert run.end(2)
    dcp_to_torch_save(folder / "step-00000002", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for path, p in run.trainer.built.parameters.items():
        assert torch.equal(whole[f"model.{path}"], p)


def test_a_large_block_is_split_in_order() -> None:
    (block,) = Place.of_all((3, 4, 5)).blocks()
    parts = list(block.split(7))
    assert [part.start for part in parts] == list(range(0, 60, 5))
    assert all(part.sizes == (1, 1, 5) for part in parts)
    assert [part.offset[:2] for part in parts] == [(i, j) for i in range(3) for j in range(4)]
    assert [part.count for part in block.split(3)][:2] == [3, 2]
