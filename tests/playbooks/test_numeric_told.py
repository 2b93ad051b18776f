"""Numbers in words, tables and forms of many programs: the cause that they allow, or none.

The artifacts stand in numeric_told/*.txt as people have them, all made up: `@case NAME CAUSE`, then
`@file NAME` and its lines. CAUSE "nothing" is a near miss: no verdict may come.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.readers import read_paths
from playbooks.engine import diagnose

_FOLDER = Path(__file__).parent / "numeric_told"


def _cases() -> list[tuple[str, str, dict[str, str]]]:
    """(name, cause, {file: text}) of all cases."""
    out: list[tuple[str, str, dict[str, str]]] = []
    for path in sorted(_FOLDER.glob("*.txt")):
        files: dict[str, str] = {}
        name = ""
        for line in path.read_text().splitlines(keepends=True):
            if line.startswith("@case "):
                _, case, cause = line.split()
                files = {}
                out.append((f"{path.stem}-{case}", cause, files))
            elif line.startswith("@file "):
                name = line.split()[1]
                files[name] = ""
            elif files:
                files[name] += line
    return out


_CASES = _cases()


@pytest.mark.parametrize(
    ("cause", "files"), [c[1:] for c in _CASES], ids=[name for name, _, _ in _CASES]
)
def test_numbers_decide(cause: str, files: dict[str, str], tmp_path: Path) -> None:
    """The right cause with lines that show it; a near miss gets no verdict at all."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = diagnose(read_paths([str(tmp_path)])).verdict
    assert (found.cause if found else "nothing") == cause
    if found is not None:
        assert found.evidence
        assert all(item.locator for item in found.evidence)


@pytest.mark.parametrize("cause", sorted({cause for _, cause, _ in _CASES}))
def test_words_alone_decide_nothing(cause: str, tmp_path: Path) -> None:
    """The same lines without their digits: what stays are words, and they give no verdict."""
    for _, other, files in _CASES:
        if other != cause:
            continue
        for name, text in files.items():
            bare = "".join("-" if c.isdigit() else c for c in text)
            (tmp_path / name).write_text(bare)
        found = diagnose(read_paths([str(tmp_path)])).verdict
        assert found is None or not found.cause.startswith("numeric.")
        break
