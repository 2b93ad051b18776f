"""Cores that processes may use, cores that a host has, collections of garbage.

In: the bare text of a line. Out: (kind, fields), or None. Kinds and fields:

| kind | fields |
|---|---|
| cpu.mask | cores as pairs [first, last], count; rank, pid, gpu, task, what (worker, quota) |
| cpu.total | cores of the host |
| cpu.numa | node, cores as pairs |
| host.gc | seconds, generation |
| train.pause, train.mark | what (checkpoint, evaluation), seconds, step; what |
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs import quantities
from collectors.readers.logs.rule import number

_HINTS: tuple[str, ...] = ("affinity", "cpu", "core", "taskset", "bound to", "pinned", "nproc")
_HINTS += ("number of worker", "checkpoint", "ckpt", "sav", "eval", "valid", "gc")
_HINTS += ("garbage", "numa", "mask")
_LIST = r"\{?\[?\(?(\d{1,4}(?:\s?-\s?\d{1,4})?(?:\s?[, ]\s?\d{1,4}(?:\s?-\s?\d{1,4})?)*)\)?\]?\}?"
_MASK = re.compile(
    (
        r"(?:affinity|cpu[_ -]?bind\S*|cpus?_allowed|mask)[^\n]{0,60}?\b(?:mask|to|[:=])"
        r"?\s*[:=]?\s*(0x[0-9a-f]{1,64}|[0-9a-f]{1,8}(?:,[0-9a-f]{8})+)\b"
    ),
    re.IGNORECASE,
)
_MASK_BARE = re.compile(r"affinity mask\s*[:=]\s*([0-9a-f]{1,64})\b", re.IGNORECASE)
_CORES = re.compile(
    (
        r"(?:affinity(?: list)?|cpus?_allowed_list|physcpubind|cpuset\.cpus(?:\.effective)?|"
        r"sched_getaffinity\(\w*\)|bound to (?:cpus?|cores?)|"
        r"pinned to (?:cpus?|cores?)|cpu[- ]?bind\S*)(?:[\s'\"]*(?:is|=|:|->|to|list|of|"
        r"cores?|cpus?)){0,3}[\s:='\"]*"
    )
    + _LIST,
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"cpu\.max\S*[\s:=]+(\d{3,9})\s+(\d{4,7})\b|\bcpu[ _]quota[\s:=]+(\d{1,4}(?:\.\d+)?)\b",
    re.IGNORECASE,
)
_SUGGESTED = re.compile(r"suggested max number of worker in current system is (\d{1,4})\b")
_TOTAL = re.compile(
    (
        r"^CPU\(s\):\s*(\d{1,5})\s*$|\bcpu_count\(\)?\W{1,4}(\d{1,5})\b|\b(?:of|has|with) "
        r"(\d{1,5}) (?:logical |physical )?(?:cores|cpus)\b|"
        r"\b(\d{1,5}) (?:logical |physical |host )(?:cores|cpus)\b|\bcores? (?:on|of) (?:the "
        r"|this )?(?:host|node|machine)\W{1,3}(\d{1,5})\b"
    ),
    re.IGNORECASE,
)
_NUMA = re.compile(r"NUMA node ?(\d{1,3}) CPU\(s\):\s*([\d,\s-]+)$|^node (\d{1,3}) cpus: ([\d ]+)$")
_SAVED = re.compile(r"\b(?:checkpoint\w*|ckpt|sav(?:e[ds]?|ing))\b", re.IGNORECASE)
_EVALUATED = re.compile(r"\b(?:eval\w*|validat\w*)\b", re.IGNORECASE)
_TOOK = re.compile(
    r"(?:\bin|\btook|\btime|\belapsed|\bfor|\bafter|\bduration|\bblock\w*|\bpaused?|"
    r"\bstall\w*)[\s:=(]{0,3}(?:about |~ ?)?"
    r"(\d+(?:\.\d+)?) ?(ms|s|secs?|seconds|min|minutes)\b",
    re.IGNORECASE,
)
_RUNTIME = re.compile(r"\beval_runtime['\"]?\s*[:=]\s*'?(\d+(?:\.\d+)?)")
"""Seconds, as transformers' Trainer reports them."""
_BEGINS = re.compile(
    r"\b(?:writing|saving|dumping|storing|save|evaluating|validating|start\w*|begin\w*|running)\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"\basync\w*\b(?! is enabled)|background|upload", re.IGNORECASE)
"""Words of a save that does not hold the training up."""
_AT = re.compile(r"\b(?:step|iteration|iter)[ _=:#]*(\d{1,12})\b", re.IGNORECASE)
_GC = re.compile(r"(?<![\w.])(?:gc\b|garbage[ -]?collect\w*)", re.IGNORECASE)
_TIME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?(ms|s|sec|secs|seconds|us)\b")
_GENERATION = re.compile(r"\bgen(?:eration)?[ =:]*(\d)\b")
_WHO = {
    "rank": re.compile(r"(?<![\w-])rank[ =:]*(\d{1,7})\b", re.IGNORECASE),
    "pid": re.compile(r"\bpid[ =:]*(\d{1,9})\b|\[(\d{2,9})\]"),
    "gpu": re.compile(r"\bGPU[ =:]*(\d{1,3})\b"),
    "task": re.compile(r"\btask\s+(\d{1,6})\b"),
}


def spans(text: str) -> list[list[int]]:
    """[[first, last], ...] of "0-3,8 10"."""
    out = []
    for found in re.finditer(r"(\d{1,4})(?:\s?-\s?(\d{1,4}))?", text):
        first = int(found[1])
        out.append([first, int(found[2]) if found[2] else first])
    return out[:256]


def of_mask(text: str) -> list[list[int]]:
    """The same for a hexadecimal mask, commas between its groups."""
    bits = int(text.replace(",", "").removeprefix("0x").removeprefix("0X") or "0", 16)
    cores = [i for i in range(min(bits.bit_length(), 1024)) if bits >> i & 1]
    out: list[list[int]] = []
    for core in cores:
        if out and core == out[-1][1] + 1:
            out[-1][1] = core
        else:
            out.append([core, core])
    return out


def read(text: str) -> tuple[str, dict[str, Any]] | None:
    """Kind and fields of a line about cores or garbage."""
    low = text.lower()
    if not any(hint in low for hint in _HINTS):
        return None
    if _GC.search(text):
        return _garbage(text)
    paused = _pause(text)
    if paused is not None:
        return paused
    found = _NUMA.search(text)
    if found:
        cores = spans(found[2] or found[4])
        return "cpu.numa", {"node": int(found[1] or found[3]), "cores": cores}
    cores = _cores(text)
    if cores:
        return "cpu.mask", {**_who(text), "cores": cores, "count": sum(b - a + 1 for a, b in cores)}
    found = _QUOTA.search(text)
    if found:
        count = float(found[3]) if found[3] else int(found[1]) / int(found[2])
        return "cpu.mask", {"what": "quota", "count": count}
    found = _SUGGESTED.search(text)
    if found:
        return "cpu.mask", {"what": "worker", "count": int(found[1])}
    found = _TOTAL.search(text)
    if found:
        return "cpu.total", {"cores": int(next(g for g in found.groups() if g))}
    return None


def _pause(text: str) -> tuple[str, dict[str, Any]] | None:
    """A save or an evaluation that is over, with the time that it took."""
    what = "checkpoint" if _SAVED.search(text) else "evaluation" if _EVALUATED.search(text) else ""
    told = _RUNTIME.search(text)
    if told:
        return "train.pause", {"what": "evaluation", "seconds": float(told[1])}
    aside = "imeout" in text or "every" in text or _ASIDE.search(text)
    took = _TOOK.search(text) if what and not aside else None
    value = number(took[1]) if took else None
    if took is None or value is None:
        return ("train.mark", {"what": what}) if what and _BEGINS.search(text) else None
    out: dict[str, Any] = {"what": what, "seconds": value * quantities.TIMES[took[2].lower()]}
    step = _AT.search(text)
    if step:
        out["step"] = int(step[1])
    return "train.pause", out


def _cores(text: str) -> list[list[int]]:
    mask = _MASK_BARE.search(text) or _MASK.search(text)
    if mask and "list" not in text.lower():
        return of_mask(mask[1])
    found = _CORES.search(text)
    if found and re.match(r"\s*%|\.\d", text[found.end() :]) is None:
        return spans(found[1])
    return []


def _who(text: str) -> dict[str, int]:
    out = {}
    for name, pattern in _WHO.items():
        found = pattern.search(text)
        if found:
            out[name] = int(next(g for g in found.groups() if g))
    return out


def _garbage(text: str) -> tuple[str, dict[str, Any]] | None:
    found = _TIME.search(text)
    value = number(found[1]) if found else None
    if found is None or value is None or re.search(r"\bgc[ .]?(?:disabled|off|freeze)", text):
        return None
    out: dict[str, Any] = {"seconds": value * quantities.TIMES[found[2]]}
    generation = _GENERATION.search(text)
    if generation:
        out["generation"] = int(generation[1])
    return "host.gc", out


_CORE_COLUMN = re.compile(r"cpus?\b|cpus?_|affinity|cores", re.IGNORECASE)


class Masks:
    """A table with a column of cores: `rank  pid  Cpus_allowed_list`."""

    def __init__(self) -> None:
        self.columns: list[str] = []
        self.place = 0

    def feed(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """The mask of a row."""
        heads = "rank" in text[:20].lower()
        if not heads and not self.columns:
            return None
        cells = re.split(r"\s*[|,]\s+|\s{2,}|\t", text.strip(" |"))
        named = [i for i, c in enumerate(cells) if _CORE_COLUMN.search(c)] if heads else []
        if named and not any(c.isdigit() for c in text):
            self.columns, self.place = cells, named[0]
            return None
        if not self.columns or not text.strip():
            self.columns = self.columns if text.strip() else []
            return None
        if len(cells) < self.place + 1 or not cells[0].isdecimal():
            return None
        mask = cells[self.place]
        cores = of_mask(mask) if mask.startswith("0x") and len(mask) < 70 else spans(mask)
        if not cores or len(cells[0]) > 7 or not re.fullmatch(r"[\d,\-x a-f]+", mask.lower()):
            return None
        count = sum(b - a + 1 for a, b in cores)
        return "cpu.mask", {"rank": int(cells[0]), "cores": cores, "count": count}
