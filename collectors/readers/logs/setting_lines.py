"""Layout and switches that set a job's pace, however they are written: stages, overlap, offload.

In: the bare text of a line (script, YAML, JSON, arguments, prose). Out: fields of kind
train.setting {name, value}: pp, microbatches, virtual, accumulation, zero, tp, cp, dp, sequence,
workers, capacity (bytes), overlap (0 or 1), offload, recompute (text), no_sync. Unlike
config.value, which is exact, this also reads sentences; a rule uses it beside a measurement, never
alone.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import number

LINES = 20_000
_TO = r"[\s\"'.=:,]*(?:to )?(?:constant )?"
_N = r"(\d{1,7})\b(?!\.\d|%)"
_COUNTS = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (
            "pp",
            (
                rf"\b(?:pipeline[_-]model[_-]parallel[_-]size|"
                rf"pipeline[_-]parallel(?:[_-](?:size|degree))?|pp(?:[_-](?:size|degree))?|"
                rf"num[_-]stages|pipeline[_ ]stages?)\b{_TO}{_N}"
            ),
        ),
        ("pp", r"\b(\d{1,4}) (?:pipeline )?stages\b|\bp ?= ?(\d{1,4})\b"),
        (
            "microbatches",
            (
                rf"\b(?:num(?:ber)?[_ ](?:of[_ ])?micro[_ -]?batches|n[_-]?micro[_-]?batches|"
                rf"micro[_ -]?batches(?: per (?:step|iteration|pipeline|rank))?|"
                rf"pipeline_parallel_microbatches|chunks)\b{_TO}{_N}"
            ),
        ),
        (
            "microbatches",
            r"\b(\d{1,5}) micro[- ]?batch(?:es|\(es\))(?! in flight)|\bm ?= ?(\d{1,5})\b",
        ),
        (
            "virtual",
            (
                rf"\b(?:virtual[_ ]pipeline[_ ]model[_ ]parallel[_ ]size|virtual[_ "
                rf"]stages(?: per rank)?|vpp|vp(?:[_-]size)?|interleav\w*)\b{_TO}{_N}"
            ),
        ),
        (
            "accumulation",
            (
                rf"\b(?:gradient[_ -]accumulation(?:[_ -]steps)?|grad[_-]?accum(?:ulation)"
                rf"?(?:[_-]steps)?|accum(?:ulation|ulate)?(?:[_-](?:steps|grad[_-]batches|"
                rf"iter\w*))?|ACC\w*|micro[_-]?steps)\b{_TO}{_N}"
            ),
        ),
        (
            "zero",
            (
                r"\b(?:zero[_ -]?(?:stage|optimization[_ -]stage)?|deepspeed[_ -]stage)"
                r"[\s\"'=:.-]*([0-3])\b(?!\.\d)"
            ),
        ),
        ("zero", r"[\"']stage[\"']\s*:\s*([0-3])\b"),
        (
            "tp",
            (
                rf"\b(?:tensor[_-]model[_-]parallel[_-]size|tensor[_-]parallel(?:[_-](?:size|"
                rf"degree))?|tp(?:[_-](?:size|degree))?)\b{_TO}{_N}"
            ),
        ),
        (
            "cp",
            (
                rf"\b(?:context[_-]parallel(?:[_-](?:size|degree))?|cp(?:[_-](?:size|degree))"
                rf"?)\b{_TO}{_N}"
            ),
        ),
        (
            "dp",
            (
                rf"\b(?:data[_-]parallel(?:[_-](?:size|degree))?|dp(?:[_-](?:size|degree))?)"
                rf"\b{_TO}{_N}"
            ),
        ),
        (
            "sequence",
            (
                rf"\b(?:seq(?:uence)?[_ -]?len(?:gth)?|max[_ ]seq(?:uence)?[_ ]len(?:gth)?|"
                rf"context[_ ]len(?:gth)?)\b{_TO}{_N}"
            ),
        ),
        ("micro_batch", rf"\b(?:micro[_-]batch[_-]size|mbs)\b{_TO}{_N}"),
        ("global_batch", rf"\b(?:global[_-]batch[_-]size|gbs)\b{_TO}{_N}"),
        ("workers", rf"\b(?:num[_-]workers|(?:data[_ -]?)?workers(?: per rank)?)\b{_TO}{_N}"),
        ("workers", r"\b(\d{1,4}) (?:data ?(?:loader)? ?)?workers\b"),
    )
)
_ON = r"(?:true|on|yes|1|enabled)\b"
_OFF = r"(?:false|off|no|0|disabled|none|null)\b"
_OVERLAP = re.compile(
    rf"\b(?:(?:\w+[_ -])?overlap[\w-]*|prefetch\w*)[\s\"'=:.]*(?:is |was |set to )?"
    rf"(?:({_ON})|({_OFF}))",
    re.IGNORECASE,
)
_NO_OVERLAP = re.compile(
    r"--no-overlap\w*|\bno (?:comm\w* )?overlap\b|\bwithout (?:comm\w* )?overlap|"
    r"overlap(?:ping)? (?:is |was )?(?:switched |turned )?off|"
    r"delay_allreduce[\s=:\"']*true|handle\.wait\(\)",
    re.IGNORECASE,
)
_OFFLOAD = re.compile(
    r"offload[_ ](?:optimizer|param\w*)\W{1,12}(?:\W*device\W{1,8})?(cpu|nvme|true)\b|"
    r"\b(?:cpu[_ -]?offload(?:ing)?|optimizer[_-]cpu[_-]offload|offload_policy|offload[_ "
    r"-]?\w*)[\s\"'=:.]+(true|cpu|nvme|on|1\.0|CPUOffload\w*)\b|"
    r"(CPUOffload(?:Policy)?\()(?!.*offload_params=False)|(--(?:optimizer-)?cpu-offload)"
    r"\b|\b(DeepSpeedCPUAdam|CPUAdam)\b|"
    r"\boffload(?:ed|ing)? (?:\w+ ){0,4}(?:to )?(?:the )?(cpu|host|nvme)\b",
    re.IGNORECASE,
)
_RECOMPUTE = re.compile(
    r"\b(?:recompute[_ -]granularity|recompute|activation[_ -]checkpoint\w*|gradient[_ "
    r"-]checkpoint\w*|ac[_ ]mode|selective_ac\w*)[\s\"'=:.]*"
    r"(?:mode[\s\"'=:.]*)?(full|selective|true|on|every layer|all layers|off|none|false)\b",
    re.IGNORECASE,
)
_FULL_SHARD = re.compile(
    (
        r"\bFULL_SHARD\b|sharding_strategy\W+full|fully_shard\(|"
        r"reshard_after_forward[\s\"'=:]*(?:true|always)|ZeRO-?3|zero3"
    ),
    re.IGNORECASE,
)
_CAPACITY = re.compile(
    (
        r"\b(?:A100|H100|H200|A800|H800|B200|L40S?|A6000|A40|A30|A10G?|V100|GH200|RTX[\w "
        r"]{0,12}|MI\d{3}X?)[\w -]{0,14}?[ -](\d{2,3}) ?G(?:i?B)?\b"
    ),
    re.IGNORECASE,
)
_NO_SYNC = re.compile(
    r"\bno_sync\(|set_requires_gradient_sync\(|accelerator\.accumulate\(|\.accumulate\(model",
    re.IGNORECASE,
)
_NEEDLES = {
    "pp": ("pipeline", "pp", "stages", "p=", "p ="),
    "microbatches": ("batches", "chunks", "m=", "m =", "batch(es)"),
    "virtual": ("virtual", "vpp", "vp", "interleav"),
    "accumulation": ("acc", "micro"),
    "zero": ("zero", "deepspeed", "stage"),
    "tp": ("tensor", "tp"),
    "cp": ("context", "cp"),
    "dp": ("data", "dp"),
    "sequence": ("seq", "context"),
    "micro_batch": ("micro", "mbs"),
    "global_batch": ("global", "gbs"),
    "workers": ("worker",),
}
"""Words of which every line that tells the setting holds one."""
_OTHERS: tuple[str, ...] = (
    "overlap",
    "prefetch",
    "offload",
    "recomp",
    "checkpoint",
    "adam",
    "shard",
)
_OTHERS += ("zero", "gb", "no_sync", "gradient_sync", "accumulate", "ac_mode")
_OTHERS += ("ac mode", "selective_ac", "80g", "delay_allreduce", "handle.wait")


class Settings:
    """Settings of one file, each said once."""

    def __init__(self) -> None:
        self.lines = 0
        self.seen: set[tuple[str, str]] = set()

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Fields of every setting that this line is the first to tell."""
        self.lines += 1
        if self.lines > LINES or len(text) > 2000:
            return []
        out = []
        for name, value in _told(text):
            if (name, str(value)) not in self.seen and len(self.seen) < 500:
                self.seen.add((name, str(value)))
                out.append({"name": name, "value": value})
        return out


def _told(text: str) -> list[tuple[str, float | str]]:
    out: list[tuple[str, float | str]] = []
    low = text.lower()
    for name, pattern in _COUNTS:
        found = pattern.search(text) if any(n in low for n in _NEEDLES[name]) else None
        value = number(next(g for g in found.groups() if g)) if found else None
        if value is not None and not any(n == name for n, _ in out):
            out.append((name, value))
    if not any(n in low for n in _OTHERS):
        return out
    out.extend(("overlap", 1.0 if found[1] else 0.0) for found in _OVERLAP.finditer(text))
    if _NO_OVERLAP.search(text):
        out.append(("overlap", 0.0))
    found = _OFFLOAD.search(text)
    if found:
        out.append(("offload", next(g for g in found.groups() if g).lower()))
    found = _RECOMPUTE.search(text)
    if found:
        out.append(("recompute", found[1].lower()))
    if _FULL_SHARD.search(text) and not any(n == "zero" for n, _ in out):
        out.append(("zero", 3.0))
    found = _CAPACITY.search(text)
    if found:
        out.append(("capacity", float(found[1]) * 2**30))
    if _NO_SYNC.search(text):
        out.append(("no_sync", 1.0))
    return out
