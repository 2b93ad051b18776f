"""Foreign text made safe to keep and to show: no escape sequences, no control characters, bounded.

In: a line as it stood in a file. Out: printable text of at most `most` characters.
"""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# C0, C1, and the marks that reorder text on a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def bare(text: str) -> str:
    """Without ANSI sequences."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def clean(text: str, most: int = 500) -> str:
    """Printable, one line, cut with an ellipsis."""
    shown = _CONTROL.sub(" ", bare(text[: most * 4])).replace("\t", " ").strip()
    return shown if len(shown) <= most else shown[: most - 1] + "…"
