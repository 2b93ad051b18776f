"""What NCCL, gloo and the OFI plugin say when something fails, in WARN lines or quoted by torch.

In: the bare text of a line. Out: rules, which match the message wherever it stands: behind NCCL's
header, as torch's "Last error", or in a traceback.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import rule
from collectors.readers.quote import clean


def _completion(text: str, out: dict[str, Any]) -> None:
    for name, pattern in (
        ("hca", r"\bhca (\w+)"),
        ("local_gid", r"localGid (\S+)"),
        ("remote_gid", r"remoteGids? ?(\S+)"),
        ("vendor", r"vendor[_ ]err[ =]?(\d+)"),
    ):
        hit = re.search(pattern, text)
        if hit:
            out[name] = clean(hit[1], 60)


_WHY = (
    r"(?P<why>Connection refused|No route to host|Connection timed out|Network is unreachable|"
    r"Host is unreachable|Operation timed out)"
)
RULES = (
    rule(
        "nccl.completion-error",
        "completion from peer",
        r"Got completion from peer (?P<peer>[^\s<]+)(?:<\d+>)? with (?:status=(?:\w+\()?|error )"
        r"(?P<i_status>\d+)",
        _completion,
    ),
    rule(
        "nccl.shm-failed",
        "/dev/shm/nccl",  # noqa: S108  # a text to find, no file to write
        r"(?:rror while (?:creating|attaching to) shared memory segment|failed to extend|"
        r"posix_fallocate failed|unable to (?:create|allocate|open)).*?(?P<path>/dev/shm/nccl\S*)",
    ),
    rule(
        "nccl.shm-failed",
        "shared memory",
        r"unable to (?:allocate|open|mmap|resize) shared memory(?: ?\(shm\))?.*?"
        r"(?P<path></?\w+>).*?(?P<why>No space left on device|Cannot allocate memory \(12\))",
    ),
    rule(
        "nccl.verbs-failed",
        "ibv_",
        r"(?:Call to )?(?P<call>ibv_\w+)(?:\(\))? failed(?: with)?(?: error)? ?(?P<i_errno>\d+)?"
        r"[: ]*(?P<message>.{0,200})",
        _completion,
    ),
    rule(
        "nccl.duplicate-gpu",
        "uplicate GPU",
        r"Duplicate GPU detected ?: rank (?P<i_one>\d+) and rank (?P<i_other>\d+) both on CUDA "
        r"device (?P<bus_id>\w+)",
    ),
    rule("nccl.duplicate-gpu", "using the same GPU", r"anks are using the same GPU"),
    rule(
        "nccl.connect-failed",
        "onnect",
        r"[Cc]onnect to (?P<peer>[^\s<]+)<(?P<i_port>\d+)> (?:failed ?:|returned) ?" + _WHY,
    ),
    rule("nccl.connect-failed", "connect returned", r"Call to connect returned " + _WHY),
    rule(
        "gloo.connect-failed",
        "onnect",
        r"(?:gloo|connectFullMesh).*connect \[(?P<peer>[^\]]+)\]:(?P<i_port>\d+): " + _WHY,
    ),
    rule(
        "nccl.no-interface",
        "interface found",
        r"(?P<message>[Nn]o socket interface found|No usable listening interface found)",
    ),
    rule(
        "gloo.no-interface",
        "Unable to find",
        r"Unable to find (?:address for|interface)(?: for)?:? (?P<name>\S+)",
    ),
    rule(
        "nccl.version-mismatch",
        "ismatched NCCL version",
        r"Mismatched NCCL version detected ?:?(?P<message>.*)",
    ),
    rule(
        "nccl.truncated",
        "Message truncated",
        r"Message truncated : received (?P<i_received>\d+) bytes instead of (?P<i_expected>\d+)",
    ),
    rule(
        "nccl.size-mismatch",
        "remote size",
        r"local size (?P<i_local>\d+) remote size (?P<i_remote>\d+)",
    ),
    rule(
        "nccl-info.version",
        "NCCL version",
        r"(?<!compiled with )NCCL version (?P<version>\d+\.\d+(?:\.\d+)?)"
        r"(?:\+cuda(?P<cuda>[\d.]+))?",
    ),
    rule("nccl.mnnvl", "MNNVL", r"MNNVL .*available but not (?:working|supported)"),
    rule(
        "nccl.cuda-failure",
        "Cuda failure",
        r"Cuda failure (?P<i_code>\d+)? ?'(?P<message>[^']*)'",
    ),
    rule("nccl.arch", "ncclMaxSharedMem", r"ncclMaxSharedMem (?P<i_need>\d+) exceeds"),
    rule(
        "nccl.p2p-disabled",
        "P2P is disabled between",
        r"P2P is disabled between connected GPUs (?P<i_one>\d+) and (?P<i_other>\d+)",
    ),
    rule(
        "nccl.speed-change",
        "speed change detected",
        r"NET/IB : (?P<device>[\w.-]+):\d+ speed change detected: (?P<i_before>\d+) -> "
        r"(?P<i_after>\d+)",
    ),
    rule(
        "nccl.port-event",
        "async",
        r"NET/IB : (?P<device>[\w.-]+):\d+ (?:Got (?:non-fatal )?async|async fatal) event"
        r"[^:]*: ?(?P<message>.*)",
    ),
    rule(
        "nccl.ofi-provider",
        "NET/OFI",
        r"NET/OFI Selected [Pp]rovider is (?P<provider>[\w;-]+)",
    ),
)
