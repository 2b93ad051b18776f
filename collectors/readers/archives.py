"""Archives that people send instead of files: tar (plain, gzip, xz, bzip2) and zip.

In: an Artifact that holds an archive. Out: an Artifact for each regular file in it, named
`archive!member`, and what was left out. Nothing is unpacked by name: members are copied, one after
the other, into one anonymous temporary file and read from there, so no name in an archive can
reach the file system; links and devices are skipped. Members, bytes and nesting are bounded.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
import tempfile
import zipfile
import zlib
from typing import IO, TYPE_CHECKING

from collectors.readers.artifact import Artifact, undone

if TYPE_CHECKING:
    from collections.abc import Iterator

    Member = tuple[str, IO[bytes]]

KIND = "archive"
MEMBERS = 20_000
"""More files in one archive are not read."""
BYTES = 8 << 30
"""More unpacked bytes of one archive are not read: a few kilobytes can claim to be a terabyte."""
DEPTH = 2
"""Archives in archives that are opened."""
_ZIP = b"PK\x03\x04"
_CHUNK = 1 << 20
_WRONG = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError,
          gzip.BadGzipFile, RuntimeError, NotImplementedError, ValueError)  # fmt: skip
"""What the two libraries raise on damaged, encrypted or exotic members."""


def sniff(head: bytes) -> bool:
    """Whether these first (uncompressed) bytes begin an archive."""
    return head[:4] == _ZIP or head[257:262] == b"ustar"


def expand(artifact: Artifact, problems: list[str], depth: int = DEPTH) -> list[Artifact]:
    """The files in an archive; what was not read goes into `problems`. OSError: no room to unpack.

    The artifacts share one temporary file, which the system removes with the last of them.
    """
    spool = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the artifacts that read it
    found: list[Artifact] = []
    start = 0
    try:
        for name, stream in _members(artifact, problems):
            size = _copy(stream, spool, BYTES - start)
            spool.flush()
            path = f"{artifact.path}!{name}"
            if start + size >= BYTES:
                problems.append(f"unpacks to more than {BYTES >> 30} GiB; read up to {name}")
                break
            inner = _slice(path, spool, start, size)
            start += size
            if sniff(inner.head) and depth > 1:
                found += expand(inner, problems, depth - 1)
            else:
                found.append(inner)
            if len(found) >= MEMBERS:
                problems.append(f"more than {MEMBERS} files; the rest was not read")
                break
    except _WRONG as wrong:
        problems.append(f"the archive breaks off after {len(found)} files: {wrong}")
    return found


def _members(artifact: Artifact, problems: list[str]) -> Iterator[Member]:
    """Each regular file and a stream of its bytes, in the order of the archive."""
    if artifact.head[:4] == _ZIP:
        yield from _zipped(artifact, problems)
        return
    with artifact.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for one in archive:
            content = archive.extractfile(one) if one.isreg() else None
            if content is not None:
                yield one.name, content


def _zipped(artifact: Artifact, problems: list[str]) -> Iterator[Member]:
    with artifact.open() as stream, zipfile.ZipFile(stream) as archive:
        names = [one for one in archive.infolist() if not one.is_dir()]
        if any(one.filename.endswith("/data.pkl") for one in names):
            problems.append("a file of torch.save, which is code to load; not read")
            return
        for one in names[: MEMBERS + 1]:
            if one.flag_bits & 1:
                problems.append(f"{one.filename} is encrypted")
                continue
            with archive.open(one) as content:
                yield one.filename, content


def _copy(source: IO[bytes], into: IO[bytes], most: int) -> int:
    """Copy at most `most` bytes; returns how many."""
    copied = 0
    while copied < most and (chunk := source.read(min(_CHUNK, most - copied))):
        into.write(chunk)
        copied += len(chunk)
    return copied


class _Stretch(io.RawIOBase):
    """Bytes `start` to `start + size` of a file, with a position of its own."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file = file
        self._start, self._size, self._at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = min(max(0, base + offset), self._size)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed wants its private Buffer
        count = min(len(buffer), self._size - self._at)
        data = os.pread(self._file.fileno(), count, self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _slice(path: str, spool: IO[bytes], start: int, size: int) -> Artifact:
    """A member as an artifact; a compressed one is undone on the way."""

    def plain() -> io.BufferedReader:
        return io.BufferedReader(_Stretch(spool, start, size))

    return undone(path, plain, size)
