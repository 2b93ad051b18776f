"""One file as a reader sees it: its first bytes, and a stream that can be opened again.

In: a path (gzip is undone on the way), or bytes that came over stdin. Out: an Artifact.
Nothing is read whole unless a reader asks for it, and then only up to the reader's bound.
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from collectors.collected import Reading

HEAD = 64 * 1024
"""Bytes by which a format is recognised."""
LINE = 64 * 1024
"""A longer line is cut; no log line that we know is."""
_CHUNK = 1 << 20


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
                except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
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
                except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
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


def _opener(path: Path) -> Callable[[], io.BufferedIOBase]:
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    if zipped:
        return lambda: gzip.GzipFile(path, "rb")
    return lambda: path.open("rb")


def _head(opened: io.BufferedIOBase) -> bytes:
    parts = b""
    with opened as stream:
        try:
            while len(parts) < HEAD:
                chunk = stream.read1(HEAD - len(parts))
                if not chunk:
                    break
                parts += chunk
        except (EOFError, zlib.error, gzip.BadGzipFile):
            pass  # the reader meets the same break and reports it with its place
    return parts


def from_file(path: Path, name: str) -> Artifact:
    """The artifact at `path`; OSError when it cannot be opened."""
    opener = _opener(path)
    stat = path.stat()
    return Artifact(name, _head(opener()), opener, stat.st_size, stat.st_mtime_ns)


def from_bytes(data: bytes, name: str = "-") -> Artifact:
    """The artifact that came over stdin."""

    def opener() -> io.BufferedIOBase:
        if data[:2] == b"\x1f\x8b":
            return gzip.GzipFile(fileobj=io.BytesIO(data))
        return io.BytesIO(data)

    return Artifact(name, _head(opener()), opener, len(data))
