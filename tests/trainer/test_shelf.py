"""The folder of checkpoints, cut off between any two of its steps on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainer.checkpoint.shelf import Shelf, name

if TYPE_CHECKING:
    from collections.abc import Callable

KEEP = 2
MARK = "whole"


class Cut(BaseException):
    """The machine dies here."""


class Disk:
    """Lets `left` changes through, then dies before the next; counts them."""

    def __init__(self, patch: pytest.MonkeyPatch, left: int) -> None:
        self.left, self.done = left, 0
        for owner, one in ((Path, "rename"), (Path, "replace"), (os, "fsync"), (shutil, "rmtree")):
            patch.setattr(owner, one, self._through(getattr(owner, one)))

    def _through(self, true: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **more: Any) -> Any:
            if self.done == self.left:
                raise Cut
            self.done += 1
            return true(*args, **more)

        return change


def put(shelf: Shelf, step: int, text: str = MARK) -> None:
    """Write a checkpoint's files, as all ranks do before it is published."""
    shelf.part(step).mkdir()
    (shelf.part(step) / MARK).write_text(text)


def begin(folder: Path, resumed: bool = True) -> Shelf:
    """As a run does."""
    shelf = Shelf(folder, KEEP)
    shelf.clean()
    shelf.kept = shelf.known() if resumed else []
    return shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    one = begin(tmp_path / "shelf")
    for step in (1, 2):
        put(one, step)
        one.publish(step)
    return one


def changes_of(shelf: Shelf, step: int) -> int:
    """How many changes publishing makes."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, left=1000)
        put(shelf, step, "new")
        shelf.publish(step)
        return disk.done


@pytest.mark.parametrize("step", [2, 3], ids=["in place of another", "as a new one"])
def test_wherever_it_is_cut_off_a_whole_one_is_named(step: int, tmp_path: Path) -> None:
    """The one before, until the new one counts; never half of either."""
    cuts = 0
    while True:
        folder = tmp_path / str(cuts)
        shelf = begin(folder)
        for each in (1, 2):
            put(shelf, each)
            shelf.publish(each)
        put(shelf, step, "new")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, left=cuts)
            try:
                shelf.publish(step)
                break
            except Cut:
                pass
        left = begin(folder)
        newest = left.known()[0]
        assert newest in {name(1), name(2), name(step)}
        assert newest != name(1) or step == 2
        text = (folder / newest / MARK).read_text()
        assert text == "new" if newest == name(3) else text in {MARK, "new"}
        put(left, 4)
        left.publish(4)
        assert begin(folder).known()[0] == name(4)
        cuts += 1
    assert cuts >= 6
    assert begin(folder).known()[0] == name(step)


def test_what_is_not_named_in_the_end_is_not_there(shelf: Shelf) -> None:
    assert changes_of(shelf, 3) >= 6
    assert sorted(one.name for one in shelf.folder.iterdir()) == ["latest", name(2), name(3)]
    assert shelf.known() == shelf.kept == [name(3), name(2)]


def test_where_the_pointer_cannot_move_the_new_one_does_not_count(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shelf, 3)
    true = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == "latest":
            raise OSError(28, os.strerror(28))
        return true(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        shelf.publish(3)
    shelf.drop(3)
    assert shelf.kept == shelf.known() == [name(2), name(1)]
    assert not (shelf.folder / name(3)).exists()


def test_names_from_the_pointer_are_only_names(shelf: Shelf) -> None:
    (shelf.folder / "latest").write_bytes(b"../shelf\n/etc\nstep-2\n\xff\n" + name(2).encode())
    assert shelf.known() == [name(2)]
