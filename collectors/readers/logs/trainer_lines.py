"""What trainers print beside their steps: saves, recompiles, non-finite values, experts, resumes.

In: the bare text of a line. Out: rules. Kinds and fields:

| kind | fields |
|---|---|
| train.save, train.saved | what (checkpoint, evaluation), step; seconds |
| train.timer | name, seconds (largest over ranks) |
| compile.recompile, compile.limit | function |
| numeric.nonfinite | rank, step, module, inherited (the value was bad before that step) |
| moe.load | layer, top (largest share, 0 to 1), entropy, experts |
| resume.from, resume.none, resume.partial | step, path; what |
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import number, rule

_INHERITED = re.compile(
    r"already non-?finite|was non-?finite before|at the start of the step",
    re.IGNORECASE,
)
_MODULE = re.compile(r"(?:^|[\s'\"(])((?:[A-Za-z_]\w*\.)+(?:[A-Za-z_]\w*|\d+))(?=['\")\s:,]|$)")


def _place(text: str, out: dict[str, Any]) -> None:
    for name, pattern in (
        ("rank", r"\brank[ =:]*(\d{1,7})\b"),
        ("step", r"\b(?:step|iteration|iter)[ =:#]*(\d{1,12})\b"),
    ):
        hit = re.search(pattern, text, re.IGNORECASE)
        if hit:
            out[name] = int(hit[1])
    module = _MODULE.search(text)
    if module:
        out["module"] = module[1]
    out["inherited"] = bool(_INHERITED.search(text))


def _load(text: str, out: dict[str, Any]) -> None:
    listed = [number(v) for v in re.findall(r"\d+(?:\.\d+)?", str(out.pop("listed", "")))]
    shares = [v for v in listed if v is not None]
    total = sum(shares)
    if len(shares) > 1 and total > 0:
        out["experts"] = len(shares)
        out["top"] = max(shares) / total
    hit = re.search(r"entropy[ =:]+([\d.]+)", text)
    value = number(hit[1]) if hit else None
    if value is not None:
        out["entropy"] = value


def _pace(text: str, out: dict[str, Any]) -> None:
    hit = re.search(r"([\d.]+) ?s/it\b", text)
    value = number(hit[1]) if hit else None
    if value is not None:
        out["step_time"] = value


def _timer(text: str, out: dict[str, Any]) -> None:
    hit = re.search(r"\(([\d.]+), ([\d.]+)\)\s*$", text)
    value = number(hit[2]) if hit else None
    if value is not None:
        out["seconds"] = value / 1000


def _megabytes(text: str, out: dict[str, Any]) -> None:  # noqa: ARG001  one signature
    """Megatron's memory report counts in units of 2^20 bytes."""
    for name in ("allocated", "peak", "reserved"):
        out[name] = round(out[name] * 2**20)


RULES = (
    rule(
        "train.step",
        "memory (MB)",
        r"\(after (?P<i_step>\d{1,9}) iterations\) memory \(MB\) "
        r"\| allocated: (?P<f_allocated>[\d.]+) "
        r"\| max allocated: (?P<f_peak>[\d.]+) \| reserved: (?P<f_reserved>[\d.]+)",
        _megabytes,
    ),
    rule(
        "train.step",
        "'loss':",
        r"\{'loss': '?(?P<f_loss>[-+\d.eE]+|nan|inf)'?(?:, 'grad_norm': '?"
        r"(?P<f_grad_norm>[-+\d.eE]+|nan|inf)'?)?"
        r"(?:, 'learning_rate': '?(?P<f_learning_rate>[-+\d.eE]+)'?)?(?:.*?'epoch': '?"
        r"(?P<f_epoch>[\d.]+)'?)?(?:.*?\bstep[=': ]+(?P<i_step>\d+))?",
        _pace,
    ),
    rule(
        "train.save",
        "aving",
        r"\b[Ss]aving (?:a |the |model |training |optimizer )*(?P<what>checkpoint|model|state)\b"
        r"(?:.*?(?:iteration|step|checkpoint-|iter_|global_step)[ =:_]*(?P<i_step>\d+))?",
    ),
    rule(
        "train.saved",
        "aved",
        r"\b(?:successfully saved|[Ss]aved|[Ff]inished saving) (?:a |the )*"
        r"(?P<what>checkpoint|model|state)\b(?:.*?(?:iteration|step|iter_)"
        r"[ =:_]*(?P<i_step>\d+))?(?:.*?\bin (?P<f_seconds>[\d.]+) ?s)?",
    ),
    rule(
        "train.saved",
        "aving the checkpoint",
        r"[Ff]inished saving the (?P<what>checkpoint) in (?P<f_seconds>[\d.]+) seconds",
    ),
    rule(
        "train.save",
        "valuat",
        r"^(?:.*- )?(?:\*+ )?(?P<what>(?:[Rr]unning |[Ss]tart(?:ing)? )?[Ee]valuat(?:ion|ing))\b",
    ),
    rule(
        "train.timer",
        "...",
        r"^\s*(?P<name>save-checkpoint|evaluate|eval-time|batch-generator|forward-compute|"
        r"backward-compute|optimizer)\s?\.{3,}: \(",
        _timer,
    ),
    rule(
        "compile.recompile",
        "Recompiling function",
        r"Recompiling function (?P<function>\S+)(?: in (?P<place>\S+))?",
    ),
    rule(
        "compile.recompile",
        "ecompil",
        r"\b[Rr]ecompil(?:e|ing|ed|ation) (?!function|limit|triggered)(?:of |for |#?\d+ )*"
        r"(?P<function>[\w.<>]+)",
    ),
    rule(
        "compile.limit",
        "torch._dynamo hit",
        r"torch\._dynamo hit config\.(?P<what>cache_size_limit|recompile_limit|"
        r"accumulated_\w+)",
    ),
    rule(
        "numeric.nonfinite",
        "inite",
        r"(?i:\bnon-?finite\b|is not finite|not finite)(?!.{0,20}(?:check|skipping disabled))",
        _place,
    ),
    rule(
        "numeric.nonfinite",
        "nan",
        r"(?:returned nan values in its|NaN check|contains? (?:nan|NaN)|(?:found|detected) nan)",
        _place,
    ),
    rule(
        "numeric.nonfinite",
        "NaN",
        r"(?:[Ff]ound|[Dd]etected|[Cc]ontains?|has) (?:a |an |\d+ )?(?:NaN|Inf|inf)s?\b",
        _place,
    ),
    rule(
        "moe.load",
        "ayer",
        r"\blayer[ =:_]*(?P<i_layer>\d{1,5})\b.*?(?:load|tokens|share|usage|expert)[^\[]{0,40}"
        r"\[(?P<listed>[\d.,%\s]+)\]",
        _load,
    ),
    rule(
        "resume.from",
        "tarting training from",
        r"[Ss]tarting training from (?:iteration|step) (?P<i_step>\d+)",
    ),
    rule(
        "resume.from",
        "oad",
        r"(?:[Ss]uccessfully )?[Ll]oaded (?:the )?(?:checkpoint|model|state)\b.*?(?:at |from )?"
        r"(?:iteration|step|global_step)[ =:_]*(?P<i_step>\d+)",
    ),
    rule(
        "resume.from",
        "esum",
        r"\b[Rr]esum(?:ing|ed)\b.*?\b(?:iteration|step|global_step)[ =:_]*(?P<i_step>\d+)",
    ),
    rule("resume.none", "load any checkpoints", r"(?P<what>will not load any checkpoints)"),
    rule(
        "resume.none",
        "heckpoint",
        r"(?P<what>\b[Nn]o (?:valid |previous )?checkpoint (?:was |is )?(?:found|exists|available)|"
        r"could not find (?:a |the )?checkpoint|[Cc]heckpoint .{0,80}(?:not found|does not exist))",
    ),
    rule(
        "resume.none",
        "from scratch",
        r"(?P<what>[Tt]raining from scratch|[Ss]tarting from scratch)",
    ),
    rule(
        "resume.partial",
        "ptimizer",
        r"(?P<what>[Oo]ptimizer states? (?:was |were |is |are )?(?:not (?:found|loaded)|missing|"
        r"re-?initiali[sz]ed)|unable to load (?:the )?optimizer)",
    ),
    rule(
        "resume.partial",
        "scheduler",
        r"(?P<what>scheduler states? (?:was |were )?(?:not (?:found|loaded)|missing))",
    ),
)


def saves(text: str) -> bool:
    """Whether a rule above tells of a save or an evaluation."""
    return any(r.kind.startswith("train.save") and r.fields(text) is not None for r in RULES)
