"""Out-of-memory sentences of torch 1.x to 2.15, of the CPU allocator, and of libraries beside it.

In: the bare text of a line. Out: rules whose fields hold every number of the sentence, in bytes; a
number that the sentence (or a cut one) lacks is not there.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import SIZE, rule, size

_OTHER = re.compile(rf"Process (\d+) has ({SIZE}) memory in use")
_PARTS = {
    "gpu": r"\bGPU (\d+)\b",
    "capacity": rf"total capac\w+ of ({SIZE})|({SIZE}) total capacity",
    "free": rf"of which ({SIZE}) is free|({SIZE}) free",
    "in_use": rf"this process has ({SIZE}) memory in use",
    "allowed": rf"({SIZE}) allowed",
    "allocated": rf"({SIZE}) is allocated by PyTorch|({SIZE}) already allocated",
    "private_pools": rf"({SIZE}) allocated in private pools",
    "reserved_unallocated": rf"({SIZE}) is reserved by PyTorch but unallocated",
    "reserved": rf"({SIZE}) reserved in total by PyTorch",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in _PARTS.items()}


def _numbers(text: str, out: dict[str, Any]) -> None:
    """The sentence's numbers; `reserved` is worked out where only its parts are given."""
    tail = text[max(0, text.find("out of memory")) :]
    for name, pattern in _COMPILED.items():
        found = pattern.search(tail)
        if found:
            shown = next(g for g in found.groups() if g is not None)
            out[name] = int(shown[:9]) if name == "gpu" else size(shown)
    out["others"] = [{"pid": int(p[:12]), "bytes": size(b)} for p, b in _OTHER.findall(tail)[:64]]
    parts = (out.get("allocated"), out.get("reserved_unallocated"))
    if "reserved" not in out and None not in parts:
        out["reserved"] = sum(p for p in parts if p is not None)
    elif "reserved_unallocated" not in out and out.get("reserved") and out.get("allocated"):
        out["reserved_unallocated"] = out["reserved"] - out["allocated"]


RULES = (
    rule(
        "oom.cuda",
        "out of memory. Tried to allocate",
        rf"(?P<device>CUDA|HIP|XPU|NPU|MPS) out of memory\. Tried to allocate (?:more than )?"
        rf"(?P<b_requested>{SIZE})?",
        _numbers,
    ),
    rule(
        "oom.cuda",
        "preemptively rejected",
        rf"(?P<device>CUDA|HIP) out of memory\. Allocation was preemptively rejected"
        rf".*?Requested size: (?P<b_requested>{SIZE})",
        _numbers,
    ),
    rule(
        "oom.cpu",
        "can't allocate memory",
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        r"(?P<i_requested>\d+) bytes",
    ),
    rule(
        "oom.cpu",
        "not enough memory",
        r"DefaultCPUAllocator: not enough memory: you tried to allocate (?P<i_requested>\d+) bytes",
    ),
    rule(
        "oom.cpu", "MemoryError", r"^(?:numpy\.\S*)?_?(?:Array)?MemoryError\b:?\s*(?P<message>.*)"
    ),
    rule("oom.library", "CUBLAS_STATUS_ALLOC_FAILED", r"(?P<api>CUBLAS_STATUS_ALLOC_FAILED)"),
    rule("oom.library", "CUDNN_STATUS_ALLOC_FAILED", r"(?P<api>CUDNN_STATUS_ALLOC_FAILED)"),
    rule("oom.library", "CUDA error: out of memory", r"(?P<api>CUDA error): out of memory"),
    rule(
        "oom.library",
        "ran out of memory outside",
        r"(?P<api>CUDA) ran out of memory outside PyTorch",
    ),
    rule("oom.library", "out of memory'", r"(?P<api>Cuda failure)(?: \d+)? 'out of memory'"),
)
