"""Which tokens, documents and held-out samples a model can take; no torch.

In: Config. Out: one line for each reason why the data cannot fit, with the flag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config

_BYTES = 256


def problems(config: Config) -> list[str]:
    """Every reason, one line each."""
    vocabulary, data = config.model.vocabulary, config.data
    found = []
    if data.dtype == "uint8" and vocabulary < _BYTES:
        found.append(
            f"model.vocabulary={vocabulary} is too small for bytes of text "
            f"(model.vocabulary={_BYTES}, or data.dtype=uint16 and a token file)"
        )
    if data.end >= vocabulary:
        found.append(
            f"data.end={data.end} is not in the vocabulary (model.vocabulary={data.end + 1})"
        )
    if data.dtype != "uint8" and not data.path:
        found.append(f"data.dtype={data.dtype} needs a token file (data.path=FILE or FOLDER)")
    return found
