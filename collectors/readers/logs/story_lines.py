"""Lines in which programs tell what a rank does: counters, ends of epochs, waits, caught errors.

In: the bare text of a line that no narrower rule knows. Out: (kind, fields), or None. Nobody agrees
on these words, so the patterns are wide and the kinds weak: rules use them only together (a counter
must rise, an end of an epoch must differ between ranks), never one line alone.
"""

from __future__ import annotations

import re
from typing import Any

from collectors.readers.logs.rule import number, rule, whole
from collectors.readers.quote import clean

_NUMBER = re.compile(r"\d[\d,.]*")
_OF = re.compile(r"(?<![\w/.:=-])(\d[\d,]{0,15})\s*(?:/|of)\s*(\d[\d,]{1,15})(?![\w/.:-]|\.\d)")
_PERCENT = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d+)?) ?%(?!\w)")
_VERB = (
    r"process|encod|tokeni[sz]|load|read|writ|wrote|copi|evaluat|generat|index|scann|download|"
    r"extract|compil|built|build|pack|shuffl|decod|preprocess|cach|convert|upload|sync|saved"
)
_VERBS = re.compile(_VERB, re.IGNORECASE)
_COUNTED = re.compile(
    rf"\b(?:{_VERB})\w*[ :=]+(\d[\d,]{{0,15}}) (?:[a-z]+)|"
    r"(?<![\w.:/-])(\d[\d,]{0,15}) (?:files|samples|documents|passages|records|examples|shards|"
    r"rows|batches|images|lines|prompts|kernels|graphs|utterances|objects)\b",
    re.IGNORECASE,
)
_NO_COUNT = re.compile(
    r"util|memory|\bmem\b|gib|\bgb\b|mfu|cpu|gpu|world|rank \d+ ?/|node", re.IGNORECASE
)
_EPOCH_END = re.compile(
    r"\bepoch[ :#=]*(?P<epoch>\d{1,6})\b.{0,30}?"
    r"\b(?:done|finished|completed?|ended|over|exhausted)\b"
    r"(?:.*?(?P<batches>\d[\d,]*) (?:batches|steps|iterations|updates))?|"
    r"\b(?:end of|finished|completed) (?:the )?(?:training )?epoch[ :#=]*(?P<last>\d{1,6})?"
    r"(?:.*?(?P<count>\d[\d,]*) (?:batches|steps|iterations|updates))?|"
    r"\b(?:data ?loader|iterator|data ?set|data|shards?)\b.{0,20}\bexhausted\b"
    r"(?:.*?(?P<left>\d[\d,]*) (?:batches|steps|iterations|updates))?|"
    r"\bno more (?:batches|data|samples)\b|\bStopIteration\b",
    re.IGNORECASE,
)
_VALIDATION = re.compile(
    r"\b(?:(?:start|begin|enter|running|run|into)\w* (?:the )?)?"
    r"(?:validation|validating|evaluating)\b"
    r"(?: on\b| with\b|:|$)|\b(?:start|begin|enter)\w* (?:the )?(?:validation|evaluation)\b",
    re.IGNORECASE,
)
_WAITING = re.compile(r"\bwaiting (?:for|in|at|on)\b(?P<what>.*)", re.IGNORECASE)
_CAUGHT = re.compile(
    r"(?:out of memory|\boom\b|\berror\b|exception|\bnan\b|failed|corrupt|"
    r"bad (?:sample|batch)).{0,400}?"
    r"\b(?:skip(?:ping|ped|s)?|ignor(?:ing|ed)|retry(?:ing)?|going on|continuing|carrying on|"
    r"moving on|trying again)\b|"
    r"\b(?:skip(?:ping|ped)?|ignoring|retrying|caught|recovered from|swallow\w*)\b.{0,200}?"
    r"(?:out of memory|\boom\b|\berror\b|exception|corrupt)",
    re.IGNORECASE,
)
_C10D = ("NCCL", "TCPStore", "watchdog", "Watchdog", "c10d", "gloo", "OVERFLOW", "frame #")


def _int(text: str | None) -> int | None:
    return None if text is None else whole(text)


def _first(found: re.Match[str], *names: str) -> int | None:
    return next((_int(found.group(n)) for n in names if found.group(n) is not None), None)


def _count(text: str) -> dict[str, Any] | None:
    """A counter: how far, of how much, and the text without its numbers, by which it is known."""
    out: dict[str, Any] = {}
    found = next(
        (
            m
            for m in _OF.finditer(text)
            if (whole(m.group(1)) or 0) <= (whole(m.group(2)) or 0) and (whole(m.group(2)) or 0) > 9
        ),
        None,
    )
    if found:
        out = {"done": _int(found.group(1)), "total": _int(found.group(2))}
    elif not _NO_COUNT.search(text) and (percent := _PERCENT.search(text)):
        value = number(percent.group(1))
        if value is not None and value <= 100:
            out = {"done": value, "total": 100}
    elif (counted := _COUNTED.search(text)) and _VERBS.search(text):
        out = {"done": _int(counted.group(1) or counted.group(2))}
    if not out or out["done"] is None:
        return None
    out["what"] = clean(_NUMBER.sub("#", text), 80)
    return out


def read(text: str) -> tuple[str, dict[str, Any]] | None:
    """The kind and fields of a line of a program's own words; None when it tells nothing."""
    if len(text) < 6 or text[0] == " " or any(word in text for word in _C10D):
        return None
    low = text.lower()
    if (
        ("skip" in low or "caught" in low or "retry" in low or "ing on" in low or "ignor" in low)
        or "again" in low
        or "recovered" in low
    ) and _CAUGHT.search(text):
        return "train.caught", {"message": clean(text, 300), "oom": _is_oom(low)}
    ended = _EPOCH_END.search(text) if _ends(low) else None
    if ended:
        fields = {
            "epoch": _first(ended, "epoch", "last"),
            "batches": _first(ended, "batches", "count", "left"),
        }
        return "train.epoch-end", {k: v for k, v in fields.items() if v is not None}
    if "waiting" in low and (waits := _WAITING.search(text)) and "client" not in low:
        return "rank.waiting", {"what": clean(waits.group("what").strip(), 100)}
    if ("valid" in low or "evaluat" in low) and _VALIDATION.search(text):
        return "train.validation", {}
    if any(c.isdigit() for c in text):
        counted = _count(text)
        if counted is not None:
            return "rank.progress", counted
    return None


def _ends(low: str) -> bool:
    return "epoch" in low or "exhausted" in low or "no more" in low or "stopiteration" in low


def _is_oom(low: str) -> bool:
    return "out of memory" in low or re.search(r"\boom\b", low) is not None


def _spawned(text: str, out: dict[str, Any]) -> None:
    local = re.search(r"--local_rank[= ]'?,? ?'?(\d{1,5})", text)
    if local:
        out["local_rank"] = int(local.group(1))


def _placement(_text: str, out: dict[str, Any]) -> None:
    """{"host": number of local processes}, in the launcher's order."""
    body = str(out.pop("body", ""))
    out["hosts"] = {
        name: len(re.findall(r"\d+", inside))
        for name, inside in re.findall(r"'([\w.-]{1,80})': \[([\d, ]*)\]", body)[:4096]
    }


def _state(_text: str, out: dict[str, Any]) -> None:
    out["state"] = str(out.get("state", "")).split(" ")[0].rstrip("+")


RULES = (
    rule(
        "rank.pid",
        "pid",
        r"(?:local_rank[ =:]+(?P<i_local_rank>\d{1,5}),? )?"
        r"\b(?:global_)?rank[ =:]+(?P<i_rank>\d{1,7})\b"
        r".{0,24}?\bpid[ =:]+(?P<i_pid>\d{1,9})\b",
    ),
    rule("deepspeed.spawned", "spawned with command", r"process (?P<i_pid>\d+) spawned", _spawned),
    rule("deepspeed.world", "WORLD INFO DICT", r"WORLD INFO DICT: (?P<body>\{.*\})", _placement),
    rule("job.exit", "exits successfully", r"Process (?P<i_pid>\d+) exits successfully"),
    rule(
        "job.exit",
        "exit",
        r"\b(?P<what>torchrun|srun|accelerate|deepspeed|launcher|mpirun|job|container|training)\b"
        r".{0,30}?\bexit(?:ed|s)?(?: with)?(?: (?:code|status))?[ =:]+(?P<i_exit_code>-?\d{1,5})\b",
    ),
    rule(
        "job.exit",
        "exit",
        r"[,;:] exit(?:ed|s)?(?: (?:code|status))?[ =:]+(?P<i_exit_code>\d{1,3})$",
    ),
    rule(
        "slurm.state",
        "0:",
        r"^(?P<job>\d+(?:_\d+)?(?:\.\w+)?)\s.*?\b(?P<state>COMPLETED|FAILED|TIMEOUT|PREEMPTED|"
        r"CANCELLED(?: by \d+)?\+?|NODE_FAIL|OUT_OF_ME\w*\+?|DEADLINE|BOOT_FAIL)\s+"
        r"(?P<i_exit_code>\d+):(?P<i_signal>\d+)",
        _state,
    ),
    rule(
        "train.done", "raining", r"(?i)\b(?:pre-?)?training (?:is )?(?:completed?|finished|done)\b"
    ),
    rule("train.done", "Trainer.fit` stopped", r"`Trainer\.fit` stopped: `\w+=\S+` reached"),
    rule("train.done", "train_runtime", r"'train_runtime': "),
    rule("train.done", "exiting program", r"exiting program (?:after|at) .*(?:iteration|minutes)"),
)
