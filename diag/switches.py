"""Environment switches that help a diagnosis and cost the job nothing.

In: the user's environment. Out: what to add, and which of ours the user had already decided: those,
and everything that belongs to them, stay exactly as they are.

Not set, and why: TORCHELASTIC_ERROR_FILE (torchrun gives each rank its own; the agent keeps
uncaught exceptions anyway), PYTHONFAULTHANDLER (the agent's business), anything that adds timing,
synchronisation or checks to the job. TORCH_FR_* are the names of torch >= 2.11; their older aliases
would make newer torch print warnings into the job's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FLIGHT_RECORDER = "captures/flight_recorder"
"""Folder of the run directory where torch's Flight Recorder dumps when a collective times out."""

_FAMILIES = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_ON_TIMEOUT"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"),
)
"""Names that decide one thing; one of them set by the user decides for the whole family."""


def choose(
    base: Mapping[str, str], run_dir: Path, host: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(variables to set, variables of ours that the user had set and that are kept)."""
    ours = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir / FLIGHT_RECORDER / "rank_"),
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_FILE": str(run_dir / "nodes" / host / "nccl.%h.%p.log"),
    }
    kept = tuple(name for family in _FAMILIES for name in family if name in base)
    for family in _FAMILIES:
        if any(name in base for name in family):
            for name in family:
                ours.pop(name, None)
    return ours, kept
