"""Sizes of model and batch that jobs print in prose: parameters, vocabulary, sequence, microbatch.

In: the bare text of a line. Out: fields of kind train.size, or None. What stands in configuration
syntax is config.value's; this knows sentences such as "4.24 B parameters" or "microbatch 4 x 8192".
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import number, whole

_HINTS = ("param", "vocab", "batch", "seq", "context", "tokens")
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_PARAMETERS = (
    re.compile(
        r"(?<![\w.])(\d[\d,.]*) ?([KMBT]?)(?:illion)? (?:trainable |total |model )?"
        r"param(?:eter)?s?\b",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b(?:n_?params?|num_params|(?:total |trainable |model )?param(?:eter)?s?)\b(?: count)?"
        r"[ :=~]+(\d[\d,.]*) ?([KMBT]?)\b",
        re.IGNORECASE,
    ),
    re.compile(r"number of parameters\D{0,80}?[:=] ?(\d[\d,.]*) ?([KMBT]?)\b", re.IGNORECASE),
)
_WHOLE = {
    "vocab": re.compile(
        r"\b(?:padded_)?vocab(?:ulary)?(?:[_ -]size)?\b[ :=.of]+(\d[\d,]{2,9})\b", re.IGNORECASE
    ),
    "sequence": re.compile(
        r"\b(?:seq(?:uence)?(?:[_ -]?len(?:gth)?)?|context(?:[_ -]len(?:gth)?)?|max_seq_len\w*)\b"
        r"[ :=.of]+(\d[\d,]{1,8})\b|\bx ?(\d[\d,]{2,8}) tokens\b",
        re.IGNORECASE,
    ),
    "micro_batch": re.compile(
        r"\b(?:micro[_ -]?batch(?:[_ -]size)?|mbs|per_device_train_batch_size|batch[_ -]size"
        r"(?: per (?:gpu|device|rank))?)\b[ :=.of]+(\d[\d,]{0,5})\b",
        re.IGNORECASE,
    ),
}


def read(text: str) -> dict[str, Any] | None:
    """The sizes in a line; None when it has none."""
    low = text.lower()
    if not any(hint in low for hint in _HINTS):
        return None
    out: dict[str, Any] = {}
    if "param" in low:
        for pattern in _PARAMETERS:
            found = pattern.search(text)
            value = number(found.group(1).rstrip(".,")) if found else None
            if found and value:
                amount = value * _SCALE[found.group(2).lower()]
                if amount >= 1e6:
                    out["parameters"] = round(amount)
                    break
    for name, sizes in _WHOLE.items():
        hit = sizes.search(text)
        shown = next((g for g in hit.groups() if g), None) if hit else None
        if shown:
            out[name] = whole(shown)
    return out or None
