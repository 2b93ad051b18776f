"""One file as a reader sees it: its first bytes, and a stream that can be opened again.

In: a path, or bytes that came over stdin; gzip, xz and bzip2 are undone. Out: an Artifact.
Nothing is read whole unless a reader asks for it, and then only up to the reader's bound.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from collectors.collected import Reading

HEAD = 64 * 1024
"""Bytes by which a format is recognised."""
LINE = 64 * 1024
"""A longer line is cut; no log line that we know is."""
_CHUNK = 1 << 20
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)
"""How a compressed stream breaks off."""


class TooLargeError(ValueError):
    """A file that has to be held in memory and exceeds its bound."""


@dataclass(frozen=True)
class Artifact:
    """A named stream of bytes."""

    path: str
    """As the user named it, or as it was found under a folder that the user named."""
    head: bytes
    open: Callable[[], io.BufferedIOBase]
    size: int | None = None
    modified_ns: int | None = None

    def data(self, most: int) -> tuple[bytes, str | None]:
        """All bytes, and how the stream broke off if it did; TooLargeError beyond `most` bytes."""
        parts: list[bytes] = []
        total = 0
        broken: str | None = None
        with self.open() as stream:
            while True:
                try:
                    chunk = stream.read1(_CHUNK)
                except BROKEN as wrong:
                    broken = f"the compressed stream breaks off: {wrong}"
                    break
                if not chunk:
                    break
                total += len(chunk)
                if total > most:
                    raise TooLargeError(f"larger than {most // 2**20} MiB, so it was not read")
                parts.append(chunk)
        return b"".join(parts), broken

    def lines(self, problems: list[str]) -> Iterator[tuple[int, str]]:
        """(line number from 1, text without its end); a carriage return ends a line as well.

        Bytes that are no UTF-8 become U+FFFD; a break in the stream goes into `problems`.
        """
        number = 0
        with self.open() as stream:
            while True:
                try:
                    raw = stream.readline(LINE)
                except BROKEN as wrong:
                    problems.append(f"read up to line {number}, where the stream breaks: {wrong}")
                    return
                if not raw:
                    return
                number += 1
                text = raw.decode("utf-8", "replace").rstrip("\r\n")
                for part in text.split("\r") if "\r" in text else (text,):
                    yield number, part


class Reader(Protocol):
    """What a module under `readers` offers."""

    KIND: str

    def sniff(self, head: bytes) -> bool:
        """Whether these first bytes are of this format. Never raises."""

    def read(self, artifact: Artifact) -> Reading:
        """All that the file says. Bad content is a problem of its Source, never an exception."""


def _undo(plain: Callable[[], io.BufferedIOBase]) -> Callable[[], io.BufferedIOBase]:
    """An opener that undoes gzip, xz or bzip2, told by the first bytes."""
    with plain() as probe:
        magic = probe.read(6)
    if magic[:2] == b"\x1f\x8b":
        return lambda: gzip.GzipFile(fileobj=plain())
    if magic == b"\xfd7zXZ\x00":
        return lambda: lzma.LZMAFile(cast("IO[bytes]", plain()))
    if magic[:3] == b"BZh":
        return lambda: bz2.BZ2File(plain())
    return plain


def _head(opened: io.BufferedIOBase) -> bytes:
    parts = b""
    with opened as stream:
        try:
            while len(parts) < HEAD:
                chunk = stream.read1(HEAD - len(parts))
                if not chunk:
                    break
                parts += chunk
        except BROKEN:
            pass  # the reader meets the same break and reports it with its place
    return parts


def undone(
    path: str,
    plain: Callable[[], io.BufferedIOBase],
    size: int | None,
    modified_ns: int | None = None,
) -> Artifact:
    """The artifact whose bytes, perhaps compressed, `plain` opens."""
    opener = _undo(plain)
    return Artifact(path, _head(opener()), opener, size, modified_ns)


def from_file(path: Path, name: str) -> Artifact:
    """The artifact at `path`; OSError when it cannot be opened."""
    stat = path.stat()
    return undone(name, lambda: path.open("rb"), stat.st_size, stat.st_mtime_ns)


def from_bytes(data: bytes, name: str = "-") -> Artifact:
    """The artifact that came over stdin."""
    return undone(name, lambda: io.BufferedReader(io.BytesIO(data)), len(data))
