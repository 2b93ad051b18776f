"""What people paste of machines and launchers: limits, PCIe, InfiniBand, options, GPUs.

In: the bare text of a line (`ulimit -a`, lspci, dmesg, perfquery, df, sbatch, nvidia-smi, notes).
Out: rules. Kinds and fields:

| kind | fields |
|---|---|
| limit.memlock, limit.reached | bytes (absent: unlimited); what |
| pcie.acs, pcie.link | flags; speed, width, degraded |
| kernel.iommu, kernel.iommu-fault | mode; device |
| note.helps | variable, value: somebody wrote that the job works with it |
| ib.port, ib.counter | device, state, physical, rate, layer; name, value |
| shm.size | total, used (bytes) |
| launch.option, launch.env | name, value |
| gpu.listed, gpu.mig | index, name |
| cuda.not-initialized, cuda.invalid-ordinal, cuda.arch | message |
| fabric.manager | message |
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import rule, size

_FLAG = (
    r"(?:ntasks-per-node|ntasks|nodes|gres|gpus-per-node|gpus-per-task|gpu-bind|"
    r"nproc[-_]per[-_]node|nnodes)"
)
_LAUNCHER = re.compile(r"#SBATCH|srun|sbatch|salloc|torchrun|torch\.distributed\.run|launch\b")
_OPTION = re.compile(rf"--({_FLAG})[= ]([\w:.,-]+)")
_ENV = (
    r"(?:NCCL_\w+|GLOO_SOCKET_IFNAME|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES|SLURM_NTASKS|"
    r"WORLD_SIZE|LD_LIBRARY_PATH)"
)
_WORKS = re.compile(
    r"\b(?:works?|worked|trains?|passes|passed|runs? (?:fine|through)|completes?|succeeds?|ok|fine|"
    r"no (?:hang|error|crash)|goes away|cured?|fixe[sd])\b",
    re.IGNORECASE,
)
_BROKEN = re.compile(
    r"\b(?:still|not|does ?n.t|hangs?|stuck|fails?|failed|same (?:hang|error)|no (?:help|change|"
    r"difference)|crash(?:es|ed)?|tried)\b",
    re.IGNORECASE,
)


def _limit(text: str, out: dict[str, Any]) -> None:
    value = str(out.pop("value", ""))
    unit = 1 if re.search(r"\bbytes", text) else 1024
    if value.isdecimal():
        out["bytes"] = int(value[:15]) * unit


def _helps(text: str, out: dict[str, Any]) -> None:
    rest = text.replace("no hang", "").replace("no error", "").replace("no crash", "")
    out["works"] = bool(_WORKS.search(text)) and not _BROKEN.search(rest)


def _shm(_text: str, out: dict[str, Any]) -> None:
    for name in ("total", "used"):
        text = str(out.get(name, ""))
        value = size(text + ("iB" if text[-1:] in "KMGT" else "KiB"))
        out[name] = value


def _link(text: str, out: dict[str, Any]) -> None:
    out["degraded"] = "downgraded" in text


def options(text: str) -> list[dict[str, Any]]:
    """name and value of every option of a launcher's command line."""
    if "--" not in text or not _LAUNCHER.search(text):
        return []
    return [
        {"name": name.replace("_", "-"), "value": value} for name, value in _OPTION.findall(text)
    ]


RULES = (
    rule(
        "limit.memlock",
        "locked memory",
        r"[Mm]ax locked memory\s+(?:\((?:kbytes|KiB|kB), -l\)\s+)?(?P<value>\S+)",
        _limit,
    ),
    rule("limit.memlock", "ulimit -l", r"ulimit -l(?: ?[:=]| is)\s*(?P<value>\w+)", _limit),
    rule("limit.reached", "Too many open files", r"(?P<what>Too many open files)"),
    rule("limit.reached", "ancdata", r"(?P<what>received \d+ items of ancdata)"),
    rule("limit.reached", "new thread", r"(?P<what>can't start new thread)"),
    rule(
        "limit.reached",
        "Resource temporarily unavailable",
        r"(?P<what>(?:fork|clone|pthread_create|BlockingIOError|libgomp: Thread creation)"
        r".{0,60}Resource temporarily unavailable)",
    ),
    rule("pcie.acs", "ACSCtl", r"ACSCtl:\s*(?P<flags>.*)"),
    rule(
        "pcie.link",
        "LnkSta:",
        r"LnkSta:\s*Speed (?P<speed>[\d.]+ ?GT/s)(?: \(\w+\))?, Width x(?P<i_width>\d+)",
        _link,
    ),
    rule("kernel.iommu", "Default domain type", r"iommu: Default domain type: (?P<mode>\w+)"),
    rule(
        "kernel.iommu-fault",
        "FAULT",
        r"(?P<device>[0-9a-f:.]+): AMD-Vi: Event logged \[IO_PAGE_FAULT",
    ),
    rule(
        "kernel.iommu-fault",
        "DMAR",
        r"DMAR: \[DMA (?:Read|Write)[^\]]*\] Request device \[(?P<device>[0-9a-f:.]+)\]",
    ),
    rule(
        "note.helps",
        "NCCL_",
        r"(?<!export )\b(?P<variable>NCCL_(?:P2P_DISABLE|IB_DISABLE|MNNVL_ENABLE|NVLS_ENABLE|"
        r"CUMEM_ENABLE|IB_GID_INDEX|SHM_DISABLE|CROSS_NIC))=(?P<value>\w+)(?=.*\b(?i:work|train|pass|"
        r"run|complete|succeed|ok\b|fine|no hang|goes|cure|fix))",
        _helps,
    ),
    rule(
        "ib.port",
        "Link layer:",
        r"(?:(?P<host>[\w.-]+): )?CA '(?P<device>[\w.-]+)'.*?State: (?P<state>\w+) Physical state: "
        r"(?P<physical>\w+) Rate: (?P<f_rate>[\d.]+).*?Link layer: (?P<layer>\w+)",
    ),
    rule(
        "ib.port",
        "==>",
        r"(?P<device>mlx\w+) .*?port \d+ (?:\((?P<state>\w+)\) )?==> \S+ \((?P<link>Up|Down)\)",
    ),
    *(
        rule("ib.counter", name, rf"^(?P<name>{name}):\.*\s*(?P<i_value>\d+)")
        for name in (
            "SymbolErrorCounter",
            "LinkDownedCounter",
            "LinkErrorRecoveryCounter",
            "PortRcvErrors",
            "LocalLinkIntegrityErrors",
            "ExcessiveBufferOverrunErrors",
        )
    ),
    rule(
        "shm.size",
        "/dev/shm",  # noqa: S108  # a text to find, no file to write
        r"^\S+\s+(?P<total>[\d.]+[KMGT]?)\s+(?P<used>[\d.]+[KMGT]?)\s+\S+\s+\d+%\s+/dev/shm$",
        _shm,
    ),
    rule(
        "launch.env",
        "=",
        rf"^(?:\+\s+)?(?:export |declare -x |ENV |setenv )?(?P<name>{_ENV})=\"?"
        r"(?P<value>[^\s\"$;]+)\"?;?\s*(?:#.*)?$",
    ),
    rule(
        "launch.env",
        "CUDA_VISIBLE_DEVICES",
        r"\b(?P<name>CUDA_VISIBLE_DEVICES)[=: ]+['\"]?(?P<value>\d+(?:,\d+)*)\b",
    ),
    rule("gpu.listed", "UUID: GPU-", r"^GPU (?P<i_index>\d+): (?P<name>.+?) \(UUID: GPU-"),
    rule("gpu.mig", "MIG-", r"MIG (?P<name>\S+)\s+Device\s+(?P<i_index>\d+): \(UUID: MIG-"),
    rule("gpu.mig", "MIG", r"\b(?P<name>MIG \dg\.\d+gb)"),
    rule("gpu.mig", "MIG-", r"CUDA_VISIBLE_DEVICES=(?P<name>MIG-\S+)"),
    rule("cuda.not-initialized", "not yet initialized", r"(?P<message>system not yet initialized)"),
    rule("cuda.invalid-ordinal", "invalid device ordinal", r"(?P<message>invalid device ordinal)"),
    *(
        rule("cuda.arch", needle, f"(?P<message>{needle})")
        for needle in (
            "no kernel image is available",
            "not compatible with the current PyTorch installation",
            "driver version is insufficient",
            "NVIDIA driver on your system is too old",
            "Driver/library version mismatch",
        )
    ),
    rule(
        "fabric.manager",
        "abric",
        r"(?P<message>nvidia-fabricmanager\S*.*(?:inactive|failed|dead|not be found|not found)|"
        r"[Ff]abric [Mm]anager .*version.*(?:don't|does not|doesn't|mis)\s?match|"
        r"[Ff]abric [Mm]anager (?:is )?not (?:running|installed|started).*)",
    ),
)
