"""Lines of the kernel log that end or slow training jobs: OOM kills, Xid, hung tasks, links.

In: the bare text behind `kernel:` or dmesg's time. Out: rules. Sizes that the kernel gives in kB
become bytes.
"""

from __future__ import annotations

from typing import Any

from collectors.readers.logs.rule import rule


def _kilobytes(_text: str, out: dict[str, Any]) -> None:
    for name in ("total_vm", "anon_rss", "usage", "limit"):
        if isinstance(out.get(name), int):
            out[name] *= 1024


RULES = (
    rule(
        "kernel.oom-kill",
        "oom-kill:constraint",
        r"oom-kill:constraint=(?P<constraint>\w+),.*?(?:oom_memcg=(?P<memcg>[^,]+),)"
        r"?(?:task_memcg=(?P<task_memcg>[^,]+),)?task=(?P<task>[^,]+),pid=(?P<i_pid>\d+)",
    ),
    rule(
        "kernel.oom-killed",
        "Killed process",
        r"(?P<scope>Memory cgroup out of memory|Out of memory)[^:]*: Killed process "
        r"(?P<i_pid>\d+),? \((?P<task>[^)]*)\)(?:.*?total-vm:(?P<i_total_vm>\d+)kB, "
        r"anon-rss:(?P<i_anon_rss>\d+)kB)?",
        _kilobytes,
    ),
    rule(
        "kernel.memory-limit",
        "memory: usage",
        r"memory: usage (?P<i_usage>\d+)kB, limit (?P<i_limit>\d+)kB, failcnt (?P<i_failures>\d+)",
        _kilobytes,
    ),
    rule(
        "kernel.xid",
        "NVRM: Xid",
        r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<i_xid>\d+),(?: "
        r"pid='?(?P<i_pid>\d+)'?,)?(?: name=(?P<task>[^,]+),)?\s*(?P<message>.*)",
    ),
    rule(
        "kernel.sxid",
        "SXid",
        r"SXid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<i_xid>\d+),\s*(?P<message>.*)",
    ),
    rule(
        "kernel.hung-task",
        "blocked for more than",
        r"INFO: task (?P<task>.+?):(?P<i_pid>\d+) blocked for more than (?P<i_seconds>\d+) seconds",
    ),
    rule(
        "kernel.segfault",
        "segfault at",
        r"(?P<task>[^\[\s]+)\[(?P<i_pid>\d+)\]: segfault at (?P<address>\S+)",
    ),
    rule("kernel.link-down", "Link down", r"(?P<device>mlx5_core \S+|\S+)[:,]? .*?Link down"),
    rule("kernel.cable", "Cable error", r"(?P<device>mlx5_core \S+).*?Cable error"),
    rule(
        "kernel.file-system",
        "not responding",
        r"(?P<what>nfs|NFS|lustre|LustreError).*?not responding",
    ),
    rule("kernel.io-timeout", "I/O timeout", r"(?P<device>nvme\S*).*?I/O.*?timeout"),
)
