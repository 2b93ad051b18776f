"""What torchtitan published for Llama 3 on H100 lies within the planner's bounds, in its order.

The planner's rates were fitted to these runs, so this guards the fit; it confirms nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from trainer.planner import timing
from trainer.planner.candidate import NUMBERS, Candidate, Job
from trainer.planner.cluster import GPUS, Cluster
from trainer.planner.presets import PRESETS

FSDP: dict[str, Any] = {"zero": 3, "microbatch": 2, "checkpointing": "selective"}
BIG: dict[str, Any] = {
    "dp": 8,
    "tp": 8,
    "sp": True,
    "pp": 8,
    "zero": 2,
    "checkpointing": "selective",
}
LONG: dict[str, Any] = {"zero": 3, "checkpointing": "full"}
RUNS = {
    "8b": ("llama3-8b", 8, 8192, 16, "bf16", 6667, FSDP | {"dp": 8}),
    "8b-fp8": ("llama3-8b", 8, 8192, 16, "fp8", 8532, FSDP | {"dp": 8}),
    "8b-128": ("llama3-8b", 128, 8192, 256, "bf16", 6514, FSDP | {"dp": 128}),
    "70b": ("llama3-70b", 256, 8192, 512, "bf16", 597,
            {"dp": 32, "tp": 8, "sp": True, "zero": 3, "microbatch": 16, "checkpointing": "full"}),
    "405b": ("llama3-405b", 512, 8192, 256, "fp8", 100, BIG),
    "405b-interleaved": ("llama3-405b", 512, 8192, 256, "fp8", 128,
                         BIG | {"virtual": 2, "schedule": "interleaved"}),
    "8b-32k": ("llama3-8b", 8, 32768, 8, "bf16", 3890, LONG | {"dp": 8}),
    "8b-64k": ("llama3-8b", 8, 65536, 4, "bf16", 2540, LONG | {"dp": 4, "cp": 2}),
    "8b-128k": ("llama3-8b", 8, 131072, 2, "bf16", 1071, LONG | {"dp": 2, "cp": 4}),
    "8b-256k": ("llama3-8b", 8, 262144, 1, "bf16", 548, LONG | {"dp": 1, "cp": 8}),
}  # fmt: skip


def _rate(name: str, rates: timing.Rates) -> float:
    """Tokens a second and GPU."""
    model, gpus, sequence, batch, numbers, _, layout = RUNS[name]
    job = Job(PRESETS[model], Cluster(GPUS["h100-96"], gpus), sequence, batch, NUMBERS[numbers])
    return job.tokens / timing.of_step(job, Candidate(**layout), rates).step / gpus


@pytest.mark.parametrize("name", RUNS)
def test_what_was_published_lies_within_the_bounds(name: str) -> None:
    published = RUNS[name][5]
    assert _rate(name, timing.WORST) < published < _rate(name, timing.BEST)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("8b", "8b-fp8"),
        ("405b", "405b-interleaved"),
        ("8b-64k", "8b-32k"),
        ("8b-128k", "8b-64k"),
        ("8b-256k", "8b-128k"),
        ("70b", "8b"),
    ],
)
def test_pairs_stand_in_the_published_order(slower: str, faster: str) -> None:
    assert RUNS[slower][5] < RUNS[faster][5]
    assert _rate(slower, timing.LIKELY) < _rate(faster, timing.LIKELY)


def test_the_median_error_of_the_likely_rate() -> None:
    errors = sorted(abs(_rate(name, timing.LIKELY) / run[5] - 1) for name, run in RUNS.items())
    assert errors[len(errors) // 2] < 0.2
