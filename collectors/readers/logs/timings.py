"""Timings in any line of a log: who (rank, stage, host, ...), which step, what, how much.

In: bare lines, one after another. Out: fields of kind train.timing {who {rank, stage, ep, host,
gpu, expert, ranks}, step, step_s, values [[quantity, number, unit, name], ...], lists {quantity:
[...]}}. Numbers that quantities.py does not know are left out; a line without a known one yields
nothing.

    "rank 3 stage 1 fwd 41.2 ms  bwd 81.0 ms"      "forward: 12 ms | backward: 30 ms"
    "{"rank": 3, "fwd_ms": 41.2}"                  "310 ms forward, 640 ms backward"

A line that names a step gives that step, and its time, to the lines below it that name none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from collectors.readers.logs import quantities
from collectors.readers.logs.rule import number
from collectors.readers.logs.timing_numbers import BARE, entry, named, unit_of

MOST = 20_000
"""Measurements of one file that are kept."""
_LONGEST = 1000
_VALUES = 40
_HINTS: tuple[str, ...] = ("fwd", "bwd", "forward", "backward", "comput", "kernel", "data", "load")
_HINTS += ("input", "fetch", "wait", "idle", "bubble", "busy", "step", "iter")
_HINTS += ("gather", "reduce", "scatter", "comm", "a2a", "all2all", "to-all")
_HINTS += ("to_all", "dispatch", "optim", "adam", "garbage", "token", "expert")
_HINTS += ("sumsq", "squared", "late", "last", "clock", "mhz", "recomp", "offload")
_HINTS += ("copy", "overhead", "launch", "eval", "ckpt", "checkpoint", "save")
_HINTS += ("compil", "util", "entropy", "imbalance", "exposed", "gap", "ms", "total")
_HINTS += ("opt ", "opt:", "opt=", "gc", "sm ")
"""Words of which every line that is read holds one; a search for them costs next to nothing."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,15})(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
    r"(?P<unit>\s?(?:%|percent\b|[nuµμm]s(?:ec)?\b|s(?:ecs?|econds?)?\b(?!/)|minutes\b|MHz\b|W\b|"
    r"°?C\b|degC\b|milliseconds\b)|[kKMGB](?![\w/]))?(?![\w.]?\w)"
)
_NEEDLES = {"ranks": "ranks", "ep": "rank", "cp": "rank", "other": "rank", "rank": "rank"}
_NEEDLES |= {"expert": "expert", "layer": "layer"}
_KEYS: tuple[tuple[str, str, re.Pattern[str]], ...] = tuple(
    (name, _NEEDLES.get(name, ""), re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("ranks", r"\branks[ =:]*\[?(\d{1,7})\s*(?:-|\.\.+|to)\s*(\d{1,7})\]?"),
        (
            "ep",
            r"(?<!per )(?<!by )\b(?:ep|expert)[ _-]?(?:parallel[ _-]?)?rank[ =:#_\"']*(\d{1,6})\b",
        ),
        (
            "stage",
            r"\b(?:pp|pipeline)[ _-]?(?:parallel[ _-]?)?(?:rank|stage)[ =:#_\"']*(\d{1,5})\b",
        ),
        (
            "cp",
            r"(?<!per )(?<!by )\b(?:cp|context)[ _-]?(?:parallel[ _-]?)?rank[ =:#_\"']*(\d{1,6})\b",
        ),
        ("other", r"\b(?:dp|tp|local|node|sp)[ _-]?rank[ =:#_\"']*(\d{1,6})\b"),
        (
            "rank",
            (
                r"(?<![\w-])(?<!per )(?<!last )(?<!each )(?<!slowest )(?<!ep )(?<!cp )(?<!dp "
                r")(?<!tp )(?<!pp )(?:global[ _])?rank[ =:#_\"']*"
                r"(\d{1,7})\b(?!\.\d|\s*(?:ms|us|s|x|%)\b)"
            ),
        ),
        ("stage", r"(?<!zero )(?<!zero-)(?<!zero_)(?<!per )\bstage[ =:#_\"']*(\d{1,5})\b(?!\.\d)"),
        ("expert", r"(?<!per )\bexpert[ =:#_\"']*(\d{1,6})\b(?!\.\d)"),
        ("layer", r"\blayer[ =:#_\"']*(\d{1,6})\b(?!\.\d)"),
        ("micro", r"\b(?:micro[ _-]?batch|mb)[ =:#_\"']*(\d{1,6})\b(?!\.\d)"),
        ("gpu", r"(?<![\w/])(?:gpu|device|cuda)[ =:#_\"']*(\d{1,4})\b(?!\.\d)(?! ?[xX%] ?)"),
        (
            "host",
            r"\b(?:host|node)(?:name)?[ =:\"']+([A-Za-z][\w.-]{0,60}|\d{1,5}(?![\w.,-]| ?%))(?!\w)",
        ),
    )
)
_STEP = re.compile(
    r"(?<![\w/-])(?<!per )(?<!per optimizer )(?:global[ _]?step|"
    r"training[ _]step|step|iteration|iter|it|update|upd)[ =:#\[\"']*"
    r"(\d{1,12})\b(?![.,]\d)(?!\s*(?:[nuµm]?s|sec\w*)\b)(?:\s*/\s*\d{1,12})?",
    re.IGNORECASE,
)
_RATE = re.compile(r"([\d.]+) ?(ms|s|sec)/(?:it|iter|step|iteration|batch)\b")
_DEFAULT = re.compile(
    r"\((ms|us|s|sec|seconds|milliseconds)\)\s*:?\s*(?:\||[A-Za-z]|$)|"
    r"\b(?:in|all|times?) (ms|milliseconds|seconds)\b|, (ms)(?=,|$)"
)
_ITEM = r"-?\d[\d.]*(?:e[+-]?\d+)?%?"
_LIST = re.compile(rf"(?<![\w.]){_ITEM}(?:[\s,;]+{_ITEM}){{2,511}}(?![\w.])")
_NAME = re.compile(r"([A-Za-z][\w /.\-()%\x00]{0,60})[\"']?\s*[:=]?\s*\[?\s*$")
_AXIS = re.compile(
    (
        r"(?:per|by|each|over)[ _]?(?:(ep|expert)[ _-](?:parallel[ _-])?rank|(rank|expert|"
        r"stage|gpu|host))"
    ),
    re.IGNORECASE,
)
_SECTION = re.compile(r"^\s*((?:[A-Za-z][\w-]*)(?: [\w-]+){0,3})\s*:\s*$")
_REASONS = (
    (0x40, re.compile(r"(?:hw|hardware)[ _]thermal", re.IGNORECASE)),
    (0x20, re.compile(r"thermal", re.IGNORECASE)),
    (0x80, re.compile(r"power[ _]?brake", re.IGNORECASE)),
    (0x8, re.compile(r"hw[ _]slow|hardware slow", re.IGNORECASE)),
    (0x4, re.compile(r"(?:sw|software)[ _]power|power[ _]?cap", re.IGNORECASE)),
    (0x2, re.compile(r"applications?[ _]clocks?", re.IGNORECASE)),
)
"""Reasons of a lower clock as nvml.h numbers them, in words."""
_INACTIVE = re.compile(r"not active|inactive|\bnone\b", re.IGNORECASE)


@dataclass
class Context:
    """What lines above told, for lines that do not say it."""

    step: int | None = None
    step_s: float | None = None
    unit: str | None = None
    section: str | None = None
    """A phase that stands alone on a line above those of its ranks."""


@dataclass
class Scanner:
    """Measurements of one file."""

    context: Context = field(default_factory=Context)
    kept: int = 0

    def feed(self, text: str) -> dict[str, Any] | None:
        """Fields of a line that measures something."""
        if self.kept >= MOST or len(text) > 4 * _LONGEST:
            return None
        low = text.lower()
        if self.context.section is None and not any(hint in low for hint in _HINTS):
            return None
        text = text[:_LONGEST]
        default = _DEFAULT.search(text)
        if default:
            self.context.unit = next(g for g in default.groups() if g)
        if not any(c.isdigit() for c in text):
            section = _SECTION.match(text)
            told = section is not None and quantities.classify(section[1], "time")
            self.context.section = section[1] if section and told else None
            return None
        who, rest, step = keys(text)
        values, lists = _values(rest, self._unit(default))
        if "time (ms) |" in text:  # DeepSpeed: "step" is the optimizer's
            values = [["optimizer", *v[1:]] if v[3].startswith("step") else v for v in values]
        if not values and self.context.section and who and step is None:
            values = _under(self.context.section, rest, self.context.unit)
        return self.told(who, step, values, lists, reason(text, values))

    def _unit(self, default: re.Match[str] | None) -> str | None:
        return next((g for g in default.groups() if g), None) if default else None

    def told(
        self,
        who: dict[str, Any],
        step: int | None,
        values: list[list[Any]],
        lists: dict[str, list[float]],
        throttle: int | None = None,
    ) -> dict[str, Any] | None:
        """One record, with what the context knows of its step; None where nothing is measured."""
        context = self.context
        whole = next((v[1] for v in values if v[0] == "step" and v[2] == "s"), None)
        if step is not None and not {"rank", "ep", "stage", "gpu"} & set(who):
            if step != context.step:
                context.step_s = None
            context.step = step
            context.step_s = whole if whole is not None else context.step_s
        if not any(v[0] != "step" for v in values) and not lists:
            return None
        self.kept += 1
        out: dict[str, Any] = {"who": who, "values": values}
        out["step"] = step if step is not None else context.step
        if whole is None and context.step_s is not None and out["step"] == context.step:
            out["step_s"] = context.step_s
        if lists:
            out["lists"] = lists
        out["throttle"] = throttle
        return {k: v for k, v in out.items() if v is not None}


def _under(section: str, text: str, default: str | None) -> list[list[Any]]:
    """The one number of a line below the name of a phase."""
    found = list(_NUMBER.finditer(text))
    if len(found) != 1:
        return []
    unit = found[0]["unit"]
    digits = found[0].group()[: len(found[0].group()) - len(unit or "")]
    one = entry(section, digits, unit, default or "ms")
    return [one] if one else []


def reason(text: str, values: list[list[Any]]) -> int | None:
    """Bits of the reasons that a line with a clock names; None without a clock."""
    if not any(v[0] == "clock" for v in values):
        return None
    if _INACTIVE.search(text):
        return 0
    return next((bit for bit, pattern in _REASONS if pattern.search(text)), 0)


def keys(text: str) -> tuple[dict[str, Any], str, int | None]:
    """(whom a line is about, the line without those words, its step)."""
    who: dict[str, Any] = {}
    low = text.lower()
    for name, needle, pattern in _KEYS:
        found = pattern.search(text) if needle in low else None
        if not found:
            continue
        if name == "ranks":
            first, last = int(found[1]), int(found[2])
            if not 0 < last - first < 65536:
                continue
            who["ranks"] = [first, last]
        elif name == "host":
            if quantities.classify(found[1], "s"):
                continue
            who["host"] = found[1]
        elif name not in who:
            who[name] = int(found[1])
        text = f"{text[: found.start()]}; {text[found.end() :]}"
    found = _STEP.search(text)
    step = int(found[1]) if found else None
    if found:
        text = f"{text[: found.start()]}\x00{text[found.end() :]}"
    return who, text, step


def _values(text: str, default: str | None) -> tuple[list[list[Any]], dict[str, list[float]]]:
    lists = _lists(text)
    out: list[list[Any]] = []
    rate = _RATE.search(text)
    if rate and (value := number(rate[1])) is not None:
        out.append(["step", value * quantities.TIMES[rate[2]], "s", "step"])
    bare = bool(BARE.search(text))
    last = 0
    spots = list(_NUMBER.finditer(text))
    for place, found in enumerate(spots[:_VALUES]):
        between = text[last : found.start()]
        behind = text[found.end() : spots[place + 1].start() if place + 1 < len(spots) else None]
        last = found.end()
        unit = found["unit"]
        digits = found.group()[: len(found.group()) - len(unit or "")]
        one = named(between, behind, digits, unit, default, bare=bare)
        if one is not None and len(out) < _VALUES:
            out.append(one)
    return out, lists


def _lists(text: str) -> dict[str, list[float]]:
    """Named lists of at least three numbers, such as tokens of each expert."""
    out: dict[str, list[float]] = {}
    for found in _LIST.finditer(text):
        before = _NAME.search(text[max(0, found.start() - 70) : found.start()])
        if before is None:
            continue
        name = before[1].replace("\x00", " ")
        numbers = [number(v.rstrip("%")) for v in re.split(r"[\s,;]+", found.group())]
        good = [v for v in numbers if v is not None]
        told = quantities.classify(name, "") or quantities.classify(name, "time")
        if told is None and re.search(r"expert|load|route", name, re.IGNORECASE):
            told = "tokens"
        if told is not None and len(good) > 2 and len(good) == len(numbers):
            axis = _AXIS.search(name)
            experts = told == "tokens" and re.search(r"expert|load", name, re.IGNORECASE)
            factor = unit_of(name, None, None)[0]
            own = (axis[1] or axis[2]) if axis else "expert" if experts else ""
            key = f"{told}/{'ep' if axis and axis[1] else own}"
            out[key] = [v * factor for v in good]
    return out
