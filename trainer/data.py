"""Real text as samples of bytes, the same for every layout.

In: a file or a folder; nothing is held in memory but names and sizes, a sample is read when needed.
Out: for a step and a dp rank, its microbatches of inputs and targets.
A sample's number is a function of step and index, and its place in the text a function of its
number and the seed: how many ranks share the reading changes nothing of what is read.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.config import ConfigError
from trainer.model import IGNORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainer.config import DataConfig

_SKIPPED = {"__pycache__", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass sees; both (microbatch, sequence), int64."""

    inputs: torch.Tensor
    targets: torch.Tensor
    """The byte after each input; IGNORE where that byte belongs to the next file."""

    def at(self, positions: torch.Tensor) -> Microbatch:
        """The same samples at some of their positions only."""
        return Microbatch(self.inputs[:, positions], self.targets[:, positions])

    def to(self, device: torch.device) -> Microbatch:
        """The same on another device."""
        return Microbatch(
            self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)
        )


@dataclass(frozen=True)
class Corpus:
    """Files laid end to end; file i holds the bytes from starts[i] to starts[i + 1]."""

    shards: tuple[Path, ...]
    starts: tuple[int, ...]
    """One more than shards; the last is the size of the whole."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.starts[-1]

    def pieces(self, offset: int, length: int) -> list[tuple[Path, int, int]]:
        """(file, first byte in it, bytes) that make up `length` bytes from `offset`."""
        out = []
        shard = bisect_right(self.starts, offset) - 1
        while length > 0:
            count = min(length, self.starts[shard + 1] - offset)
            out.append((self.shards[shard], offset - self.starts[shard], count))
            offset, length, shard = offset + count, length - count, shard + 1
        return out


class Loader:
    """Reads the microbatches of one dp rank."""

    def __init__(
        self, corpus: Corpus, *, sequence: int, global_batch: int, microbatch: int, seed: int
    ) -> None:
        self.corpus = corpus
        self.sequence = sequence
        self.global_batch = global_batch
        self.microbatch = microbatch
        self.seed = seed
        self.windows = (corpus.size - 1) // sequence
        """Samples in an epoch: every byte but the first is a target once."""
        self.locate: Callable[[Path], Path] = as_named
        """Where a shard really lies: the seam for a cache, a mirror, or a fault."""

    def load(self, step: int, dp_index: int, dp_size: int) -> list[Microbatch]:
        """This rank's microbatches of `step`; those of all dp ranks are the global batch, in order.

        Raises OSError when a file has shrunk or gone since the start.
        """
        share = self.global_batch // dp_size
        first = step * self.global_batch + dp_index * share
        samples = [self.read_sample(number) for number in range(first, first + share)]
        batches = []
        for at in range(0, share, self.microbatch):
            inputs, targets = zip(*samples[at : at + self.microbatch], strict=True)
            batches.append(
                Microbatch(torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets)))
            )
        return batches

    def read_sample(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of sample `number`, each `sequence` int64 byte values."""
        epoch, position = divmod(number, self.windows)
        offset = shuffled(position, self.windows, self.seed, epoch) * self.sequence
        pieces = self.corpus.pieces(offset, self.sequence + 1)
        text = b"".join(self.read_shard(*piece) for piece in pieces)
        values = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        inputs, targets = values[:-1], values[1:].copy()
        ends = np.cumsum([count for _, _, count in pieces])[:-1]
        targets[ends - 1] = IGNORE
        return inputs, targets

    def read_shard(self, shard: Path, start: int, count: int) -> bytes:
        """`count` bytes of a file from `start`; a pipe cannot seek, so there it reads past them."""
        with self.locate(shard).open("rb") as file:
            if file.seekable():
                file.seek(start)
            else:
                file.read(start)
            text = file.read(count)
        if len(text) < count:
            raise OSError(f"{shard} is shorter than it was when the run began")
        return text


def as_named(shard: Path) -> Path:
    """A shard lies where its name says."""
    return shard


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Which of `count` windows stands at `position` of an epoch: a permutation without a table.

    Four Feistel rounds permute the least 4^k >= count (Luby & Rackoff 1988); a result beyond count
    is sent through again until it falls inside, which keeps it one-to-one (Black & Rogaway 2002).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            text = f"{seed}/{epoch}/{turn}/{right}".encode()
            noise = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
            left, right = right, left ^ (noise & mask)
        position = left << half | right
        if position < count:
            return position


def open_corpus(config: DataConfig, least: int) -> Corpus:
    """The files that the config names, sorted by path; ConfigError if they cannot make a sample."""
    root = Path(config.path) if config.path else Path(sysconfig.get_path("stdlib"))
    if root.is_dir():
        shards = sorted(_files(root, config.suffixes))
    elif root.exists():
        shards = [root]
    else:
        raise ConfigError([f"data.path={root} does not exist (data.path=FILE or FOLDER)"])
    sizes = [shard.stat().st_size for shard in shards]
    filled = [(shard, size) for shard, size in zip(shards, sizes, strict=True) if size]
    corpus = Corpus(
        shards=tuple(shard for shard, _ in filled),
        starts=tuple(accumulate((size for _, size in filled), initial=0)),
    )
    if corpus.size < least:
        raise ConfigError(
            [
                (
                    f"data.path={root} holds {corpus.size} bytes in {len(filled)} files ending in "
                    f"{', '.join(config.suffixes)}; one sample needs {least} "
                    f"(data.path, data.suffixes, train.sequence)"
                )
            ]
        )
    return corpus


def _files(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files below `root` with one of these endings, outside folders of installed packages."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]
        yield from (Path(folder, name) for name in names if name.endswith(suffixes))
