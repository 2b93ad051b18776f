"""What several rule families say alike: when somebody ended the job, where a rank was, frames."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.facts import is_diag
from playbooks.finding import Item
from playbooks.words import clock

if TYPE_CHECKING:
    from playbooks.evidence import Evidence
    from playbooks.policy import Policy

SIGINT, SIGABRT, SIGKILL, SIGTERM = 2, 6, 9, 15
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARY = ("site-packages", "dist-packages", "/lib/python3", "<frozen", "<string>")
_C10D = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")


INSIDE = re.compile(
    r"distributed_c10d\.py|c10d_logger\.py|_functional_collectives|ProcessGroup|nccl\w*\b|gloo|"
    r"\b(?:all_?reduce|all_?gather\w*|reduce_scatter\w*|barrier|broadcast|all_to_all\w*)\b|"
    r"torch/cuda/__init__\.py|\bsynchronize\b|cudaStreamSynchronize|cuStreamSynchronize|"
    r"cudaEventSynchronize|monitored_barrier",
)
"""A frame of a collective, or of a wait for the device."""


def ended_by_others_ns(evidence: Evidence) -> int | None:
    """When somebody began to end the job from outside: the earliest SIGINT, SIGTERM or their trace.

    None when nobody did. What ends after that ends because of it.
    """
    times = [
        e.at_ns for e in evidence.ends if e.at_ns is not None and e.signal in (SIGINT, SIGTERM)
    ]
    times += [
        r.at_ns for r in evidence.raised if r.at_ns is not None and r.kind.name == "interrupted"
    ]
    if not times and evidence.interrupted and evidence.run.get("ended_ns"):
        times = [int(evidence.run["ended_ns"])]
    return min(times) if times else None


def is_after_the_fact(evidence: Evidence, policy: Policy, at_ns: int | None) -> bool:
    """Whether an end at `at_ns` came when the job already stood still or was being ended."""
    if at_ns is None:
        return False
    if evidence.hang_ns is not None and at_ns > evidence.hang_ns:
        return True
    outside = ended_by_others_ns(evidence)
    if outside is None:
        return False
    # An interrupt reaches all ranks at once: ends of the same moment are its work. A launcher's
    # SIGTERM follows the first death, so there only what is clearly later is.
    slack = -policy.together_ns if evidence.interrupted else policy.together_ns
    return at_ns > outside + slack


def is_in_operation(evidence: Evidence, rank: int) -> bool:
    """Whether a rank with a pending operation waits in it.

    Its frames decide: a send that was only posted leaves the rank free. Without frames it waits.
    """
    if rank not in evidence.waits.inside:
        return False
    looks = evidence.stacks.get(rank) or []
    return not looks or any(INSIDE.search(f) for s in looks for f in s.frames[:6])


def where_was(evidence: Evidence, rank: int) -> str:
    """ " in backward of step 12" from the phase that was open, "" when none is known."""
    found = evidence.open_phases.get(rank)
    if found is None:
        return ""
    step = "" if found.step is None else f" of step {found.step}"
    return f" in {found.phase}{step}"


def phase_item(evidence: Evidence, rank: int) -> list[Item]:
    """The open phase of a rank as evidence."""
    found = evidence.open_phases.get(rank)
    if found is None:
        return []
    step = "no step" if found.step is None else f"step {found.step}"
    return [
        Item(
            f"ranks/{rank:05d}",
            f"{step}, phase {found.phase}",
            f"rank {rank} entered {found.phase} at {clock(found.start_ns)} and has not left it",
        )
    ]


def frames(traceback: str) -> list[tuple[str, int, str]]:
    """(file, line, function) of each frame of a traceback but diag's own, innermost last."""
    found = _FRAME.findall(traceback)
    return [(f, int(n), name) for f, n, name in found if not is_diag(f)]


def own_frame(traceback: str) -> str | None:
    """The innermost frame of the program itself: "train.py:88 load"; else the innermost one."""
    found = frames(traceback)
    own = [f for f in found if not any(part in f[0] for part in _LIBRARY)] or found
    if not own:
        return None
    file, line, name = own[-1]
    return f"{file}:{line} {name}"


def inside_c10d(traceback: str) -> bool:
    """Whether the innermost frames are torch's collectives: the error came over the wire."""
    return any(part in f[0] for f in frames(traceback)[-3:] for part in _C10D)
