"""Every layout must read the same text, each byte once an epoch, and never across a file's end."""

from __future__ import annotations

import sysconfig
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from trainer.config import ConfigError, DataConfig
from trainer.corpus import Corpus, open_corpus
from trainer.data import Loader, shuffled
from trainer.model import IGNORE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    (tmp_path / "deep").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "no.txt").write_text("no" * 50)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG" * 50)
    for i, size in enumerate((1, 50, 3, 200, 17, 8, 120)):
        name = f"{'deep/' if i % 2 else ''}{i}.txt"
        (tmp_path / name).write_bytes(random.integers(0, 256, size, dtype=np.uint8).tobytes())
    return tmp_path


def loader(corpus: Corpus, **changes: int) -> Loader:
    return Loader(
        corpus, **{"sequence": 8, "global_batch": 8, "microbatch": 2, "seed": 0, **changes}
    )


def whole_text(corpus: Corpus) -> bytes:
    return b"".join(shard.read_bytes() for shard in corpus.shards)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_any_number_of_replicas_reads_the_same_batch(
    folder: Path, dp: int, microbatch: int
) -> None:
    corpus = open_corpus(DataConfig(path=str(folder)), 9)
    alone = loader(corpus, microbatch=8)
    shared = loader(corpus, microbatch=microbatch)
    for step in range(20):
        want = alone.load(step, 0, 1)[0]
        got = [batch for index in range(dp) for batch in shared.load(step, index, dp)]
        assert torch.equal(torch.cat([batch.inputs for batch in got]), want.inputs)
        assert torch.equal(torch.cat([batch.targets for batch in got]), want.targets)


def test_an_epoch_sees_every_window_once_and_the_next_in_another_order(folder: Path) -> None:
    corpus = open_corpus(DataConfig(path=str(folder)), 9)
    one = loader(corpus)
    text = whole_text(corpus)
    windows = sorted(text[at : at + 8] for at in range(0, one.windows * 8, 8))
    epochs = [
        [bytes(one.read_sample(epoch * one.windows + i)[0].tolist()) for i in range(one.windows)]
        for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == windows
    assert epochs[0] != epochs[1]
    again = loader(corpus, seed=1)
    assert epochs[0] != [bytes(again.read_sample(i)[0].tolist()) for i in range(one.windows)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 1025])
def test_shuffling_is_a_permutation_of_any_length(count: int) -> None:
    orders = [[shuffled(i, count, 0, epoch) for i in range(count)] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(count))
    if count > 10:
        assert orders[0] != orders[1]
        moved = sum(1 for i, one in enumerate(orders[0]) if i != one)
        assert moved > count / 2


def test_targets_are_the_next_byte_and_end_with_their_file(folder: Path) -> None:
    corpus = open_corpus(DataConfig(path=str(folder)), 9)
    one = loader(corpus)
    valid = 0
    for number in range(one.windows):
        inputs, targets = one.read_sample(number)
        known = targets != IGNORE
        valid += int(known.sum())
        follows = np.append(inputs[1:], targets[-1])
        assert np.array_equal(targets[known], follows[known])
    covered = one.windows * 8
    ends = sum(1 for start in corpus.starts[1:-1] if start <= covered)
    assert valid == covered - ends


def test_a_folder_is_read_by_suffix_in_a_fixed_order(folder: Path) -> None:
    corpus = open_corpus(DataConfig(path=str(folder)), 9)
    names = [shard.name for shard in corpus.shards]
    assert names == ["0.txt", "2.txt", "4.txt", "6.txt", "1.txt", "3.txt", "5.txt"]
    assert corpus.size == 1 + 50 + 3 + 200 + 17 + 8 + 120
    alone = open_corpus(DataConfig(path=str(folder / "picture.png")), 9)
    assert alone.size == 200


def test_the_standard_library_is_there_by_default() -> None:
    corpus = open_corpus(DataConfig(), 9)
    assert corpus.size > 1_000_000
    assert all(str(shard).startswith(sysconfig.get_path("stdlib")) for shard in corpus.shards)
    assert all("site-packages" not in shard.parts for shard in corpus.shards)


@pytest.mark.parametrize(
    ("path", "words"), [("absent", "does not exist"), ("deep", "one sample needs 5000")]
)
def test_text_that_is_not_enough_is_refused(folder: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_corpus(DataConfig(path=str(folder / path)), 5000)
    assert words in caught.value.problems[0]
    assert "data.path" in caught.value.problems[0]


def test_a_file_that_shrank_is_an_error_not_short_data(folder: Path) -> None:
    corpus = open_corpus(DataConfig(path=str(folder)), 9)
    one = loader(corpus)
    (folder / "deep" / "3.txt").write_bytes(b"x")
    with pytest.raises(OSError, match=r"3\.txt is shorter than it was"):
        for number in range(one.windows):
            one.read_sample(number)
