"""A corpus as samples of tokens, the same for every layout.

In: a corpus; nothing is held in memory, a sample is read when needed.
Out: for a step and a dp rank, its microbatches of inputs, targets and documents.
A sample's number is a function of step and index, and its window of the corpus a function of its
number and the seed: the whole state is the step, and how many ranks share the reading changes
nothing of what is read.

    windows   0 1 2 ... ─ one fixed order ─► trained ... | held out: read by evaluation only
                                                └─ another order each epoch ─► samples
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer import documents as documents_file
from trainer.config import ConfigError
from trainer.corpus import read_tokens
from trainer.model import IGNORE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.corpus import Corpus
    from trainer.documents import Documents


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass sees."""

    inputs: torch.Tensor
    """(microbatch, sequence), int64."""
    targets: torch.Tensor
    """The token after each input; IGNORE where that token belongs to the next document."""
    documents: Documents | None = None
    """Where attention keeps to documents, those of the same positions."""

    def at(self, positions: torch.Tensor) -> Microbatch:
        """The same samples at some of their positions only."""
        return Microbatch(
            self.inputs[:, positions],
            self.targets[:, positions],
            self.documents and self.documents.at(positions),
        )

    def to(self, device: torch.device) -> Microbatch:
        """The same on another device."""
        return Microbatch(
            self.inputs.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.documents and self.documents.to(device),
        )


class Loader:
    """Reads the microbatches of one dp rank."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence: int,
        global_batch: int,
        microbatch: int,
        seed: int,
        end: int = -1,
        documents: bool = False,
        vocabulary: int = 256,
        held: float = 0.0,
    ) -> None:
        """`held` is the share of windows that training never sees; the rest as in the settings."""
        self.corpus = corpus
        self.sequence = sequence
        self.global_batch = global_batch
        self.microbatch = microbatch
        self.seed = seed
        self.end = end
        self.documents = documents
        self.vocabulary = vocabulary
        self.windows = (corpus.size - 1) // sequence
        """Of `sequence` targets each: every token but the first is a target of one of them, and but
        those at the end of the corpus that make no whole window."""
        self.held = math.ceil(held * self.windows)
        self.trained = self.windows - self.held
        """Samples in an epoch."""
        self.locate: Callable[[Path], Path] = as_named
        """Where a shard really lies: the seam for a cache, a mirror, or a fault."""
        self.order_of: Callable[[int], int] = as_numbered
        """Which order an epoch has: the seam for a fault."""

    def load(self, step: int, dp_index: int, dp_size: int) -> list[Microbatch]:
        """This rank's microbatches of `step`; those of all dp ranks are the global batch, in order.

        Raises OSError when a file has shrunk or gone since the start, and ValueError for a token
        that the vocabulary does not have.
        """
        return self._share(self.window, step, dp_index, dp_size)

    def load_held(self, batch: int, dp_index: int, dp_size: int) -> list[Microbatch]:
        """As `load`, of the global batch `batch` of the samples that training never sees."""
        return self._share(self.held_window, batch, dp_index, dp_size)

    def window(self, number: int) -> int:
        """Which window sample `number` of training is."""
        epoch, position = divmod(number, self.trained)
        return self._place(shuffled(position, self.trained, self.seed, self.order_of(epoch)))

    def held_window(self, number: int) -> int:
        """Which window sample `number` of evaluation is."""
        return self._place(self.trained + number)

    def read_sample(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of sample `number` of training, each `sequence` int64 tokens."""
        return self.read_window(self.window(number))

    def read_window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of one window."""
        pieces = self.corpus.pieces(window * self.sequence, self.sequence + 1)
        values = np.concatenate([self.read_shard(*piece) for piece in pieces]).astype(np.int64)
        if values.max() >= self.vocabulary:
            raise ValueError(
                f"token {values.max()} in {', '.join(str(shard) for shard, _, _ in pieces)} is not "
                f"in the vocabulary (model.vocabulary={self.vocabulary}, data.dtype)"
            )
        inputs, targets = values[:-1], values[1:].copy()
        ends = np.cumsum([count for _, _, count in pieces])[:-1]
        targets[ends - 1] = IGNORE
        targets[inputs == self.end] = IGNORE
        return inputs, targets

    def read_shard(self, shard: Path, start: int, count: int) -> np.ndarray:
        """`count` tokens of a file from token `start`."""
        with self.locate(shard).open("rb") as file:
            tokens = read_tokens(file, start, count, self.corpus.dtype)
        if len(tokens) < count:
            raise OSError(f"{shard} is shorter than it was when the run began")
        return tokens

    def _share(
        self, window: Callable[[int], int], batch: int, dp_index: int, dp_size: int
    ) -> list[Microbatch]:
        share = self.global_batch // dp_size
        first = batch * self.global_batch + dp_index * share
        samples = [self.read_window(window(number)) for number in range(first, first + share)]
        batches = []
        for at in range(0, share, self.microbatch):
            inputs, targets = zip(*samples[at : at + self.microbatch], strict=True)
            batches.append(
                Microbatch(
                    torch.from_numpy(np.stack(inputs)),
                    torch.from_numpy(np.stack(targets)),
                    documents_file.of_targets(targets, IGNORE) if self.documents else None,
                )
            )
        return batches

    def _place(self, position: int) -> int:
        """The window at `position` of the fixed order, whose end is held out whatever the seed."""
        return shuffled(position, self.windows, 0, -1) if self.held else position


def require(loader: Loader, evaluated: int) -> None:
    """ConfigError unless some samples are trained on, `evaluated` are held out, and tokens fit.

    Only the first window's tokens are looked at: a wrong data.dtype or vocabulary mostly shows.
    """
    found = []
    if loader.held < evaluated or not loader.trained:
        found.append(
            f"eval.held holds out {loader.held:,} of {loader.windows:,} samples and leaves "
            f"{loader.trained:,}; eval.batches x train.global_batch = {evaluated:,} are needed, "
            f"and some to train on (eval.held, eval.batches, or more data: data.path)"
        )
    try:
        loader.read_window(0)
    except ValueError as error:
        found.append(str(error))
    if found:
        raise ConfigError(found)


def as_numbered(epoch: int) -> int:
    """Every epoch has an order of its own."""
    return epoch


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
