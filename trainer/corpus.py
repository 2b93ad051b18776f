"""The files that a run reads: text, whose bytes are the tokens, or token files, mapped into memory.

In: the data section. Out: `Corpus`: files end to end, each a whole number of tokens; nothing but
names and sizes is held. What cannot be read as asked is refused here, before anything starts.
"""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from trainer.config import DataConfig

_KINDS = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
_TEXT = (".py", ".txt", ".md", ".rst")
_TOKENS = (".bin",)
_SKIPPED = {"__pycache__", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    """Files laid end to end; file i holds the tokens from starts[i] to starts[i + 1]."""

    shards: tuple[Path, ...]
    starts: tuple[int, ...]
    """One more than shards; the last is the size of the whole."""
    dtype: np.dtype[np.unsignedinteger]
    """Of a token in the files."""

    @property
    def size(self) -> int:
        """Tokens in all."""
        return self.starts[-1]

    def pieces(self, offset: int, length: int) -> list[tuple[Path, int, int]]:
        """(file, first token in it, tokens) that make up `length` tokens from `offset`."""
        out = []
        shard = bisect_right(self.starts, offset) - 1
        while length > 0:
            count = min(length, self.starts[shard + 1] - offset)
            out.append((self.shards[shard], offset - self.starts[shard], count))
            offset, length, shard = offset + count, length - count, shard + 1
        return out


def read_tokens(
    file: BinaryIO, start: int, count: int, dtype: np.dtype[np.unsignedinteger]
) -> np.ndarray:
    """`count` tokens of an open file from token `start`, fewer where it ends before.

    A file is mapped, so that ranks of a node share one copy in the page cache; a pipe has no pages,
    and is read past what is not wanted.
    """
    size = dtype.itemsize
    if not file.seekable():
        file.read(start * size)
        text = file.read(count * size)
        return np.frombuffer(text, dtype, len(text) // size)
    there = max(0, min(count, os.fstat(file.fileno()).st_size // size - start))
    if there == 0:
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r", offset=start * size, shape=(there,))


def open_corpus(config: DataConfig, least: int) -> Corpus:
    """The files that the config names, sorted by path; ConfigError if they cannot make a sample."""
    root = Path(config.path) if config.path else Path(sysconfig.get_path("stdlib"))
    dtype: np.dtype[np.unsignedinteger] = np.dtype(_KINDS[config.dtype])
    suffixes = config.suffixes or (_TEXT if dtype.itemsize == 1 else _TOKENS)
    if root.is_dir():
        shards = sorted(_files(root, suffixes))
    elif root.exists():
        shards = [root]
    else:
        raise ConfigError([f"data.path={root} does not exist (data.path=FILE or FOLDER)"])
    sizes = [shard.stat().st_size for shard in shards]
    torn = [s for s, size in zip(shards, sizes, strict=True) if size % dtype.itemsize]
    if torn:
        raise ConfigError(
            [
                (
                    f"{torn[0]} is no whole number of {config.dtype} tokens: its size is no "
                    f"multiple of {dtype.itemsize} bytes (data.dtype, data.path, data.suffixes)"
                )
            ]
        )
    filled = [(s, size // dtype.itemsize) for s, size in zip(shards, sizes, strict=True) if size]
    corpus = Corpus(
        shards=tuple(shard for shard, _ in filled),
        starts=tuple(accumulate((size for _, size in filled), initial=0)),
        dtype=dtype,
    )
    if corpus.size < least:
        unit = "bytes" if dtype.itemsize == 1 else "tokens"
        raise ConfigError(
            [
                (
                    f"data.path={root} holds {corpus.size} {unit} in {len(filled)} files ending in "
                    f"{', '.join(suffixes)}; one sample needs {least} "
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
