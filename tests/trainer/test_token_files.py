"""Token files, held-out samples, and a stream of tokens that no layout changes."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import ConfigError, DataConfig
from trainer.corpus import Corpus, open_corpus
from trainer.data import Loader, Microbatch
from trainer.model import IGNORE
from trainer.parallel.context import positions
from trainer.settings import load

END = 3


def token_loader(corpus: Corpus, **changes: float) -> Loader:
    told = {"sequence": 8, "global_batch": 4, "microbatch": 2, "seed": 0, "vocabulary": 1000}
    return Loader(corpus, **(told | changes))


@pytest.fixture(params=["uint16", "uint32"])
def tokens(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DataConfig, list[np.ndarray]]:
    random = np.random.default_rng(2)
    files = [random.integers(0, 1000, size) for size in (100, 7, 250)]
    for i, values in enumerate(files):
        values.astype(f"<u{np.dtype(request.param).itemsize}").tofile(tmp_path / f"{i}.bin")
    (tmp_path / "notes.txt").write_text("no tokens")
    return DataConfig(path=str(tmp_path), dtype=request.param, end=END), files


def test_windows_of_token_files_are_their_tokens_end_to_end(
    tokens: tuple[DataConfig, list[np.ndarray]],
) -> None:
    told, files = tokens
    corpus = open_corpus(told, 9)
    whole = np.concatenate(files)
    assert corpus.size == len(whole)
    one = token_loader(corpus)
    for window in range(one.windows):
        inputs, targets = one.read_window(window)
        assert np.array_equal(inputs, whole[window * 8 : window * 8 + 8])
        known = targets != IGNORE
        assert np.array_equal(targets[known], whole[window * 8 + 1 : window * 8 + 9][known])


def test_a_document_ends_with_its_file_and_with_its_token(
    tokens: tuple[DataConfig, list[np.ndarray]],
) -> None:
    told, files = tokens
    one = token_loader(open_corpus(told, 9), end=END, documents=True)
    whole = np.concatenate(files)
    last = set(np.flatnonzero(whole == END)) | {99, 106}
    for window in range(one.windows):
        _, targets = one.read_window(window)
        ends = {window * 8 + int(at) for at in np.flatnonzero(targets == IGNORE)}
        assert ends == {at for at in last if window * 8 <= at < window * 8 + 8}
    (batch, *_) = one.load(0, 0, 1)
    assert batch.documents is not None
    for row, targets in zip(batch.documents.begins.tolist(), batch.targets, strict=True):
        for at, (before, after) in enumerate(pairwise(row)):
            assert after == (at + 1 if targets[at] == IGNORE else before)


def test_token_files_that_cannot_be_are_refused(
    tokens: tuple[DataConfig, list[np.ndarray]], tmp_path: Path
) -> None:
    told, _ = tokens
    (tmp_path / "torn.bin").write_bytes(b"12345")
    with pytest.raises(ConfigError, match=r"torn\.bin is no whole number of uint\d\d tokens"):
        open_corpus(told, 9)
    (tmp_path / "torn.bin").unlink()
    with pytest.raises(ConfigError, match=r"holds 357 tokens in 3 files ending in \.bin"):
        open_corpus(told, 9000)
    one = token_loader(open_corpus(told, 9), vocabulary=500)
    with pytest.raises(ValueError, match=r"token \d+ in .*\.bin .*\(model\.vocabulary=500"):
        for window in range(one.windows):
            one.read_window(window)
    (tmp_path / "0.bin").write_bytes(b"1234")
    with pytest.raises(OSError, match=r"0\.bin is shorter than it was"):
        one.read_window(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.vocabulary=200"], "too small for bytes of text (model.vocabulary=256"),
        (["data.dtype=uint16"], "data.dtype=uint16 needs a token file (data.path="),
        (["data.end=256"], "data.end=256 is not in the vocabulary (model.vocabulary=257)"),
        (["data.end=-2"], "data.end=-2 must be 0 or more"),
        (
            ["model.vocabulary=257", "parallel.tp=2"],
            "does not divide model.vocabulary=257 (parallel.tp=1 or model.vocabulary=258)",
        ),
        (["eval.held=1"], "eval.held=1 must be below 1"),
        (["optim.schedule=cosin"], "did you mean optim.schedule=cosine?"),
    ],
)
def test_settings_of_data_that_cannot_work_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments, 2)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def of_size(size: int) -> Corpus:
    return Corpus((Path("none"),), (0, size), np.dtype(np.uint8))


@given(
    size=st.integers(30, 2000),
    sequence=st.integers(1, 14),
    seed=st.integers(0, 2**31),
    held=st.floats(0, 0.5),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_sample_once_and_none_that_is_held_out(
    size: int, sequence: int, seed: int, held: float
) -> None:
    one = token_loader(of_size(size), sequence=sequence, seed=seed, held=held)
    kept = [one.held_window(number) for number in range(one.held)]
    for epoch in range(2):
        first = epoch * one.trained
        seen = [one.window(number) for number in range(first, first + one.trained)]
        assert sorted(seen + kept) == list(range(one.windows))
    other = token_loader(of_size(size), sequence=sequence, seed=seed + 1, held=held, global_batch=8)
    assert kept == [other.held_window(number) for number in range(other.held)]


@given(data=st.data(), documents=st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_layout_changes_the_stream_of_tokens(data: st.DataObject, documents: bool) -> None:
    """A rank of any dp, cp and microbatch has its rows and positions of one global batch."""
    dp, cp = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.sampled_from([1, 2, 3]))
    microbatch = data.draw(st.sampled_from([1, 2]))
    step, held = data.draw(st.integers(0, 500)), data.draw(st.booleans())
    text = np.random.default_rng(7).integers(0, 20, 700).astype(np.uint8)
    told = {"sequence": 12, "global_batch": 24, "end": END, "documents": documents, "held": 0.5}

    def read(self: Loader, _shard: Path, start: int, count: int) -> np.ndarray:
        return text[start : start + count]

    def batches(dp_index: int, dp_size: int, size: int) -> list[Microbatch]:
        one = token_loader(of_size(len(text)), microbatch=size, **told)
        return (one.load_held if held else one.load)(0 if held else step, dp_index, dp_size)

    with mock.patch.object(Loader, "read_shard", read):
        (want,) = batches(0, 1, 24)
        for index in range(cp):
            own = positions(12, index, cp)
            got = [b.at(own) for i in range(dp) for b in batches(i, dp, microbatch)]
            assert len(got) == 24 // microbatch
            assert torch.equal(torch.cat([b.inputs for b in got]), want.inputs[:, own])
            assert torch.equal(torch.cat([b.targets for b in got]), want.targets[:, own])
            if documents:
                begins = torch.cat([b.documents.begins for b in got])
                assert torch.equal(begins, want.documents.begins[:, own])


def test_a_pipe_is_read_as_the_file_that_it_stands_for(
    tokens: tuple[DataConfig, list[np.ndarray]],
) -> None:
    """As when a fault lets reading stall: nothing there can be mapped."""
    told, _ = tokens
    one = token_loader(open_corpus(told, 9))
    true = one.read_window(1)

    def pipe(shard: Path) -> Path:
        reading, writing = os.pipe()
        os.write(writing, shard.read_bytes())
        os.close(writing)
        ends.append(reading)
        return Path(f"/proc/self/fd/{reading}")

    ends: list[int] = []
    one.locate = pipe
    again = one.read_window(1)
    assert all(np.array_equal(a, b) for a, b in zip(true, again, strict=True))
    for end in ends:
        os.close(end)
