"""What diag itself says while a job runs: on stderr, a line at a time, and little.

stdout belongs to the job. A terminal that is gone or a full disk behind stderr stops nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys

_said: set[str] = set()


def say(text: str) -> None:
    """Write `text` and a line end to stderr."""
    with contextlib.suppress(OSError, ValueError):
        os.write(2, (text + "\n").encode("utf-8", "backslashreplace"))


def note(text: str) -> None:
    """One line of diag's own."""
    say(f"diag: {text}")


def trouble(what: str, wrong: BaseException) -> None:
    """Say once that `what` failed; the job is never part of it."""
    if what not in _said:
        _said.add(what)
        reason = getattr(wrong, "strerror", None) or str(wrong) or type(wrong).__name__
        if not isinstance(wrong, OSError):
            reason = f"{type(wrong).__name__}: {reason}"
        note(f"{what}: {' '.join(reason.split())[:300]}")


def colour() -> bool:
    """Whether stderr is a terminal that may show colour (no-color.org)."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
