"""Archives: what is in them is read like loose files, and nothing in them can do harm."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from collectors.readers import archives, read_paths

LOG = b"step 1 loss 2.0\n"
DATA = Path(__file__).parents[3] / "shared" / "data"


def tarred(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def kinds(path: Path) -> dict[str, str]:
    return {s.path.rpartition("/")[2]: s.kind for s in read_paths([str(path)]).sources}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_a_tar_is_read_like_the_folder_it_was(tmp_path: Path, mode: str) -> None:
    path = tarred(tmp_path / "logs", {"a.log": LOG, "b.log.gz": gzip.compress(LOG)}, mode)
    assert kinds(path) == {"logs": "archive", "logs!a.log": "log", "logs!b.log.gz": "log"}
    events = read_paths([str(path)]).rows("log_events")
    assert [e["source"].rpartition("!")[2] for e in events] == ["a.log", "b.log.gz"]


def test_archives_in_archives_are_opened_to_a_depth(tmp_path: Path) -> None:
    inner = zipped(tmp_path / "inner.zip", {"c.log": LOG}).read_bytes()
    middle = tarred(tmp_path / "middle.tar", {"inner.zip": inner, "m.log": LOG}, "w").read_bytes()
    path = zipped(tmp_path / "outer.zip", {"x/middle.tar": middle})
    told = {s.path.partition("outer.zip")[2]: s.kind for s in read_paths([str(path)]).sources}
    assert told["!x/middle.tar!m.log"] == "log"
    assert told["!x/middle.tar!inner.zip"] == "unknown"


@pytest.mark.parametrize("undone", [gzip.compress, bz2.compress, lzma.compress])
def test_single_files_are_uncompressed(tmp_path: Path, undone: object) -> None:
    path = tmp_path / "a.log.x"
    path.write_bytes(undone(LOG))  # type: ignore[operator]
    assert kinds(path) == {"a.log.x": "log"}


def test_names_and_links_in_an_archive_reach_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret.log"
    secret.write_bytes(LOG)
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("../../escaped.log", "/abs.log"):
            info = tarfile.TarInfo(name)
            info.size = len(LOG)
            archive.addfile(info, io.BytesIO(LOG))
        link = tarfile.TarInfo("link.log")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
        pipe = tarfile.TarInfo("pipe")
        pipe.type = tarfile.FIFOTYPE
        archive.addfile(pipe)
    before = {p.name for p in tmp_path.iterdir()}
    sources = read_paths([str(path)]).sources
    assert {s.path.partition("!")[2] for s in sources} == {"", "../../escaped.log", "/abs.log"}
    assert {p.name for p in tmp_path.iterdir()} == before
    assert not (tmp_path.parent.parent / "escaped.log").exists()


def test_a_bomb_is_read_up_to_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "BYTES", 1 << 20)
    path = zipped(tmp_path / "bomb.zip", {"a.log": LOG, "zeros": bytes(64 << 20), "z.log": LOG})
    (told,) = [s for s in read_paths([str(path)]).sources if s.kind == "archive"]
    assert told.read == "part"
    assert "unpacks to more than" in told.problems[0]


def test_too_many_members_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MEMBERS", 3)
    path = tarred(tmp_path / "many.tgz", {f"{i}.log": LOG for i in range(9)})
    sources = read_paths([str(path)]).sources
    assert sum(s.kind == "log" for s in sources) == 3
    assert any("more than 3 files" in p for s in sources for p in s.problems)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.99])
def test_a_cut_archive_gives_what_it_holds(tmp_path: Path, keep: float) -> None:
    content = "".join(f"step {i} loss {1 / (i + 1)}\n" for i in range(400)).encode()
    whole = tarred(tmp_path / "a.tgz", {f"{i}.log": content for i in range(4)}).read_bytes()
    path = tmp_path / "cut.tgz"
    path.write_bytes(whole[: int(len(whole) * keep)])
    sources = read_paths([str(path)]).sources
    (told,) = [s for s in sources if s.kind == "archive"]
    assert told.read == "part"
    assert told.problems


def test_damaged_and_encrypted_zips_are_said(tmp_path: Path) -> None:
    whole = zipped(tmp_path / "a.zip", {"a.log": LOG * 1000}).read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:-30])
    locked = bytearray(whole)
    for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(magic) + at] |= 1
    (tmp_path / "locked.zip").write_bytes(bytes(locked))
    for name, said in (("cut.zip", "breaks off"), ("locked.zip", "encrypted")):
        (told,) = [s for s in read_paths([str(tmp_path / name)]).sources if s.kind == "archive"]
        assert said in told.problems[0]


def test_a_saved_model_is_not_unpacked(tmp_path: Path) -> None:
    path = zipped(tmp_path / "model.pt", {"model/data.pkl": b"\x80\x02.", "model/data/0": bytes(8)})
    (told,) = read_paths([str(path)]).sources
    assert told.kind == "archive"
    assert "torch.save" in told.problems[0]


@pytest.mark.skipif(not DATA.is_dir(), reason="the real artifacts are not here")
def test_the_ranks_of_a_real_tar_are_all_read() -> None:
    collected = read_paths([str(DATA / "kineto/dlrm_v100_8rank/dlrm_kineto.tar.gz")])
    assert sum(s.kind == "kineto" for s in collected.sources) == 8
