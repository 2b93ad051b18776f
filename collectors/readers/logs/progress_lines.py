"""Lines by which trainers show that they progress: step, loss, time a step, throughput.

In: the bare text of a line of any trainer (Megatron, DeepSpeed, torchtitan, fairseq, timm, tqdm,
hand-written). Out: fields of kind train.step, or None. A line counts when it names a step and at
least one number of it; "saving checkpoint at iteration 100" does not. Times are seconds.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import number, rule, size, whole

_N = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)\b))"
_HINTS = ("step", "iter", "it ", "it=", "it:", "epoch", "upd", "batch", "it/s", "s/it")
"""Literal words, one of which every progress line holds; looked for before any pattern."""
_STEPS = (
    re.compile(r"\bnum_updates[=: ]+(\d{1,12})()"),
    re.compile(r"\bepoch \d+:\s+(\d{1,12}) / (\d{1,12})\b"),
    re.compile(r"\bEpoch:? \[\d+\](?:\[)?\s*\[?\s*(\d{1,12})\s*/\s*(\d{1,12})\]"),
    re.compile(
        r"(?:^|[\s|,\[(])(?:global_?step|steps?|iteration|iter|it|upd|update|batch)\b"
        r"[\s:=#]*(\d{1,12})(?:\s*/\s*(\d{1,12}))?(?![\d.]*%)",
        re.IGNORECASE,
    ),
    re.compile(r"\b(\d{1,12})/(\d{1,12}) \[\d+:\d+(?::\d+)?<"),
)
_NUMBERS = {
    "loss": re.compile(rf"\b(?:lm[_ ]|train[_ ]|total[_ ])?loss\b[\s:=]*{_N}", re.IGNORECASE),
    "grad_norm": re.compile(rf"\b(?:grad[ _]?norm|gnorm|grad)\b[\s:=]*{_N}", re.IGNORECASE),
    "loss_scale": re.compile(rf"\bloss[_ ]scale\b[\s:=]*{_N}", re.IGNORECASE),
    "learning_rate": re.compile(rf"\b(?:lr|learning rate)\b[\s:=\[]*{_N}", re.IGNORECASE),
    "tokens_per_s": re.compile(
        rf"\b(?:tok(?:en)?s?/s(?:ec)?(?:/gpu)?|tps|tgs|tokens per second)[\s:=]*{_N}", re.IGNORECASE
    ),
    "samples_per_s": re.compile(
        rf"\b(?:(?:samples|img|images|utt)/s(?:ec)?|samples per second|qps|CurrSamplesPerSec)"
        rf"[\s:=]*{_N}",
        re.IGNORECASE,
    ),
    "skipped": re.compile(rf"\b(?:number of skipped iterations|skipped)\b[\s:=]*{_N}"),
    "nan_iterations": re.compile(rf"\bnumber of nan iterations\b[\s:=]*{_N}"),
    "data_time": re.compile(rf"\b[Dd]ata(?:[_ ]time)?\b[\s:=]*{_N}(?! ?(?:GiB|MiB|GB|MB))"),
    "mfu": re.compile(rf"\bmfu\b[\s:=]*{_N}", re.IGNORECASE),
}
_SECONDS = (
    (re.compile(rf"elapsed time per iteration \(ms\): {_N}"), 1e-3),
    (re.compile(rf"\b(?:step|iter(?:ation)?)[ _]time[\s:=]+{_N} ?ms\b", re.IGNORECASE), 1e-3),
    (re.compile(rf"\biter(?:ation)? time \(s\):? {_N}"), 1.0),
    (re.compile(rf"{_N} ?s(?:ec)?/(?:step|iter|it|upd|batch)\b"), 1.0),
    (re.compile(rf"\b(?:time/step|step[_ ]time|train_wall|Time)\b[\s:=]*{_N}"), 1.0),
    (re.compile(rf"(?:^|[|,\s])(?<!data )(?<!wait )(?<!load ){_N} s(?=\s*(?:$|\|))"), 1.0),
)
_RATE = re.compile(rf"{_N} ?it/s\b")
_BYTES = r"(\d[\d.]*) ?([KMGT]i?)B?(?![\w/])"
_MEMORY = {
    "allocated": re.compile(
        rf"\b(?:MemAllocated|mem_alloc\w*|alloc\w*)[\s:=]*{_BYTES}", re.IGNORECASE
    ),
    "peak": re.compile(rf"\b(?:max[_ ]?mem\w*|peak\w*(?: mem\w*)?)[\s:=]*{_BYTES}", re.IGNORECASE),
    "reserved": re.compile(rf"\breserved[\s:=]*{_BYTES}", re.IGNORECASE),
    "memory": re.compile(rf"\b(?:(?:gpu )?mem(?:ory)?)[\s:=]*{_BYTES}", re.IGNORECASE),
}
"""Sizes that carry their unit; what "memory" means is the program's secret, so it stands apart."""


def _seconds(text: str) -> float | None:
    for pattern, unit in _SECONDS:
        found = pattern.search(text)
        value = number(found.group(1)) if found else None
        if value is not None:
            return value * unit
    found = _RATE.search(text)
    rate = number(found.group(1)) if found else None
    return 1 / rate if rate else None


def _memory(text: str, low: str) -> dict[str, int]:
    out: dict[str, int] = {}
    if "mem" not in low and "alloc" not in low and "reserved" not in low and "peak" not in low:
        return out
    for name, pattern in _MEMORY.items():
        hit = pattern.search(text)
        value = size(f"{hit.group(1)} {hit.group(2)}B") if hit else None
        if value is not None:
            out[name] = value
    return out


def step(text: str) -> dict[str, Any] | None:
    """Fields of a progress line; None when `text` is none."""
    low = text.lower()
    if not any(hint in low for hint in _HINTS):
        return None
    found = next((m for p in _STEPS if (m := p.search(text))), None)
    if not found:
        return None
    out: dict[str, Any] = {"step": whole(found.group(1))}
    if found.group(2):
        out["steps"] = whole(found.group(2))
    for name, pattern in _NUMBERS.items():
        hit = pattern.search(text)
        value = number(hit.group(1)) if hit else None
        if value is not None:
            out[name] = value
    seconds = _seconds(text)
    if seconds is not None:
        out["step_time"] = seconds
    out.update(_memory(text, low))
    return out if len(out) > 1 + ("steps" in out) else None


RULES = (
    rule(
        "train.overflow",
        "OVERFLOW!",
        r"OVERFLOW!.*?[Ll]oss scale: (?P<f_scale>[\d.e+]+)"
        r"(?:, reducing to (?P<f_reduced>[\d.e+]+))?",
    ),
    rule(
        "train.overflow",
        "overflow detected",
        r"overflow detected.*?(?:loss scale to|reducing to):? (?P<f_reduced>[\d.e+]+)",
    ),
    rule(
        "train.world",
        "ank",
        r"\brank[ =:]*(?P<i_rank>\d{1,7}) ?(?:/|of) ?(?P<i_world_size>\d{1,7})\b(?!\.\d)",
    ),
    rule(
        "train.world",
        "world",
        r"\b(?:dist_)?world[_ ]size[\s=:]+(?P<i_world_size>\d{1,7})\b",
    ),
    rule(
        "train.done",
        "rain",
        r"^(?:\W*)(?i:training (?:completed|complete|finished|done)|done training)\b",
    ),
    rule("train.done", "finished", r"^finished \d+ (?:epochs|steps|iterations)\b"),
)
