"""What the ranks of a job that goes on do when one looks: slow.data-bound, host-bound, gc-pauses.

In: main threads of ranks at one or more looks, and progress lines. Out: at most one root. A share
of the looks is a share of the time; few looks say little, so the word for it is "possible" then.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from playbooks.rules.naming import progressed, root
from playbooks.words import count

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.finding import Finding
    from playbooks.policy import Policy

_PLACES = (
    ("gc-pauses", re.compile(r"\bgc_collect|\bgc\.collect|collect \(gc|_PyGC_Collect")),
    (
        "data-bound",
        re.compile(r"dataloader\.py|_next_data|_try_get_data|_next_index|torchdata|/datasets?/"),
    ),
    (
        "host-bound",
        re.compile(
            r"\bitem \(|_local_scalar_dense|cudaStreamSynchronize|cudaLaunchKernel|"
            r"cuStreamSynchronize|\bsynchronize \(torch/cuda|\.cpu \("
        ),
    ),
)
_FRAMES = 6
"""Innermost frames that say where a thread is."""
_SAID = {
    "gc-pauses": "collect garbage",
    "data-bound": "wait in the data loader",
    "host-bound": "wait for the device or launch kernels",
}


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """Where most looks find the ranks."""
    if evidence.run or evidence.stopped or not progressed(evidence):
        return []
    looks = [s for some in evidence.stacks.values() for s in some]
    found = Counter(p for s in looks if (p := _place(s.frames)) is not None)
    if not found or len(looks) < policy.looks_least:
        return []
    place, times = found.most_common(1)[0]
    if times < policy.looks_share * len(looks):
        return []
    items = [s.item for s in looks if _place(s.frames) == place][:4]
    return [
        root(
            f"slow.{place}",
            "likely" if len(looks) >= 2 * policy.looks_least else "possible",
            f"{times} of {count(len(looks), 'look')} at {count(len(evidence.stacks), 'rank')} find "
            f"the main thread where ranks {_SAID[place]}, while steps go on.",
            [],
            more=items,
            excluded=(("hang.rank-stalled", "steps go on"),),
            formula=f"{times} / {len(looks)} looks",
        )
    ]


def _place(frames: tuple[str, ...]) -> str | None:
    inner = frames[:_FRAMES]
    return next((n for n, pattern in _PLACES if any(pattern.search(f) for f in inner)), None)
