"""What a number in a log measures, by the words beside it and its unit.

In: a name such as "fwd/microbatch" or (
    "all-gather of parameters exposed"
), and a unit class. Out: one
word of a small vocabulary, or None. Words only select what a number is; no rule decides by a name.

| unit class | quantities |
|---|---|
| time (s), share | data, forward, backward, fwdbwd, optimizer, cpu_optimizer, copy, recompute, |
|   | compute, expert, allgather, reducescatter, allreduce, a2a, p2p, comm, wait, idle, gc, |
|   | compile, checkpoint, evaluation, host, step, late, part, other; share only: util |
| count | tokens, sumsq, length, samples, last, reductions, buckets, imbalance, entropy |
| others | clock, clock_max, power, limit, limit_default, temperature |
"""

from __future__ import annotations

import re
from functools import lru_cache

TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "usec": 1e-6, "ms": 1e-3, "msec": 1e-3}
TIMES |= {"millis": 1e-3, "milliseconds": 1e-3, "microseconds": 1e-6, "m": 60.0, "min": 60.0}
TIMES |= {"s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "minutes": 60.0}
UNITS = {"%": "share", "percent": "share", "mhz": "clock", "w": "power", "c": "heat", "°c": "heat"}
UNITS |= {"degc": "heat"}


def _words(*rules: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((name, re.compile(pattern)) for name, pattern in rules)


_TIMED = _words(
    ("gc", r"\bgc\b|garbage"),
    ("late", r"\blate(?:ness|st)?\b|\bbehind\b|\barriv\w+|\bdelay\b|\blag\b"),
    (
        "cpu_optimizer",
        (
            r"\b(?:cpu|host)\b.*\b(?:adam\w*|optim\w*)|\b(?:adam\w*|optim\w*)\b.*\b(?:cpu|host)\b|"
            r"cpuadam"
        ),
    ),
    ("part", r"optimizer (?:gradients|allgather|inner|copy|clip|unscale|count)|\binner\b"),
    ("comm", r"\bnon ?compute\b"),
    ("recompute", r"\brecomp\w*|\brematerial\w*|forward again|re ?forward"),
    ("compile", r"\b(?:re)?compil\w*|dynamo|inductor"),
    ("checkpoint", r"\b(?:ckpt|checkpoint\w*|save|saving|saves)\b"),
    ("evaluation", r"\b(?:eval\w*|validat\w*|val)\b"),
    (
        "data",
        (
            r"\bdata(?: ?load\w*| ?time| ?wait\w*)?$|\bdata\b(?!.*parallel)|\binput\b|"
            r"\b(?:data ?)?load(?:er|ing)?\b"
            r"|\bbatch (?:gen\w*|fetch\w*|load\w*|wait\w*|prep\w*|time)|(?:next|get|fetch|"
            r"wait\w* for) (?:the )?"
            r"(?:next )?batch|\bfetch\w*|\bdecod\w+|\bcollat\w+|\btokeni[sz]\w*|"
            r"train dataloader next|"
            r"\bnext\(|\bprefetch wait"
        ),
    ),
    (
        "copy",
        (
            r"\b(?:h2d|d2h|htod|dtoh|memcpy\w*|offload\w*|swap\w*|pcie|pageable|nvme|paging)\b|"
            r"(?:host|cpu) (?:to|→|2) (?:device|gpu)|(?:device|gpu) (?:to|→|2) (?:host|cpu)|"
            r"\bcop(?:y|ies)\b"
        ),
    ),
    (
        "expert",
        (
            r"expert\w*.*(?:kernel|comput|gemm|ffn|mlp|time|fwd|forward)|grouped ?gemm|"
            r"moe (?:gemm|comput|ffn|mlp|layer|expert)\w*|^experts?$"
        ),
    ),
    ("compute", r"run training batch|\btraining step\b"),
    (
        "part",
        (
            r"^(?!.*\b(?:fwd|forward|bwd|backward)\b).*(?:\bdense\b|\battention\b|\battn\b|"
            r"\bmlp\b|\bembed\w*)"
        ),
    ),
    ("idle", r"\bidle\b|\bbubble\b|\bstarv\w+"),
    ("wait", r"\bwait\w*|\bstall\w*|\bblocked\b|\bbarrier\b|\bspin\w*|\bskew\b"),
    ("a2a", r"\ball ?(?:to|2) ?all\w*|\balltoall\w*|\ba2a\b|\bdispatch\b|\bcombine\b"),
    (
        "allgather",
        r"\ball ?gather\w*|\bag\b|\bunshard\w*|gather\w* (?:of )?param\w*|param\w* gather\w*",
    ),
    ("reducescatter", r"\breduce ?scatter\w*|\brs\b"),
    (
        "allreduce",
        (
            r"\b(?:nccl)?all ?reduc\w*|\bar\b|\bgrad\w* ?(?:sync\w*|reduc\w*|comm\w*|exchange)|"
            r"(?:sync\w*|reduc\w*|exchange) (?:of )?(?:the )?grad\w*|\breducer\b|\bddp\b"
        ),
    ),
    ("p2p", r"\bp2p\b|\bsend\w*|\brecv\w*|\breceiv\w*|\btransfer\w*"),
    (
        "comm",
        r"\bcomm\w*|\bnccl\w*|\bcollectives?\b|\bexposed\b|\bnetwork\b|\btp\b|\bcp\b|\bring\b",
    ),
    ("fwdbwd", r"\b(?:fwd|forward|fprop)\b.*\b(?:bwd|backward|bprop)\b|\bfb\b"),
    ("forward", r"\bfwd\b|\bforward\b|\bfprop\b"),
    ("backward", r"\bbwd\b|\bbackward\b|\bbprop\b"),
    ("optimizer", r"\bopt\b|\boptim\w*|\badamw?\b|\bparam\w* update|\bweight update|\bclip\w*"),
    (
        "host",
        (
            r"\b(?:cuda)?launch\w*|\baten item\b|\blocal scalar|"
            r"\bpython\b|\boverhead\b|\bhost\b|\bcpu\b|\bsynchroni[sz]\w*|"
            r"\bitem\b|\bgap\w*"
        ),
    ),
    (
        "compute",
        r"\bcompute\b|\bcomputing\b|\bkernels?\b|\bbusy\b|\bgpu\b|\bgemms?\b|\bmatmuls?\b|\bcuda\b",
    ),
    (
        "step",
        (
            r"\bstep\b|\biter(?:ation)?s?\b|\bit\b|\btotal\b|\belapsed\b|\bwall\w*|\be2e\b|\bbatch\b|"
            r"\bround\b|\bupdate\b|^time$|\btime per\b"
        ),
    ),
    ("other", r"\bother\b|\bmisc\b|\brest\b|\bremain\w*|\bunaccounted\b"),
)
_SHARED = _words(("util", r"\butil\w*|\boccupancy\b|\bsm active\b|\bsmact\b|\bgpu (?:use|usage)\b"))
_COUNTED = _words(
    ("tokens", r"^(?!.*(?:per|/) ?s(?:ec)?\b)(?!.*\bdrop)(?!.*\bus\b).*\btokens?\b"),
    (
        "sumsq",
        r"sum ?sq\w*|squared?\b|\bsq\b|quadratic|\bflops?\b|\bwork\b|\bcost\b|sum l 2|l\^2|l²",
    ),
    (
        "length",
        r"\b(?:seq\w*|doc\w*|sample|max|longest)? ?len(?:gth)?s?\b|\blongest\b|\bmax ?seq\w*",
    ),
    ("last", r"^last(?: rank| arriv\w*)?$|\bslowest(?: rank)?$|\blast(?: to)? (?:enter|arriv)\w*"),
    (
        "reductions",
        (
            r"\b(?:(?:nccl)?all ?reduces?|reductions?|grad\w* (?:syncs?|reductions?|all ?reduces?)|"
            r"nccl calls)\b.*"
            r"\b(?:step|iter\w*|update)\b|(?:per|a) (?:step|iter\w*|update).*(?:all ?reduces?|"
            r"reductions?|syncs?)|"
            r"\b(?:num|n|number of) (?:(?:nccl)?all ?reduces?|reductions?|grad\w* syncs?)"
        ),
    ),
    ("buckets", r"\bbuckets?\b(?!.*(?:mb|mib|cap|size|elem|bytes))"),
    (
        "imbalance",
        (
            r"\bmax ?(?:to|over|/)? ?mean\b|\bmax ?(?:over|/) ?avg\b|\bimbalance\b|\bload factor\b|"
            r"\bload ratio\b|\bhot\w* ?(?:over|/|to) ?mean\b"
        ),
    ),
    ("entropy", r"\bentropy\b"),
    ("samples", r"^(?!.*\b(?:sec|s)\b)(?!.*consumed).*\b(?:samples|sequences|docs)\b"),
)
_IMBALANCE = dict(_COUNTED)["imbalance"]
_EXACT = {"data", "fwd", "forward", "bwd", "backward", "opt", "optim", "optimizer", "fwd bwd"}
_EXACT |= {"forward backward", "fwdbwd"}
"""Names that mean a time even where no unit says so."""
_NOISE = re.compile(
    r"\((?:ms|us|s|sec|seconds)\)|\b(?:ms|us|secs?|seconds|avg|average|mean|median|p50|"
    r"time|times|took|"
    r"takes|spent|took about|about|approx)\b"
)
_SPLIT = re.compile(r"[_\-+/&>=:.'\"`*#~]+")
_LONGEST = re.compile(r"^(?:max|longest) (?:seq\w*|doc\w*|sample) ?len(?:gth)?$")
_NOT_MEASURED = re.compile(
    r"\b(?:predict\w*|expected|theor\w*|estimat\w*|target|ideal|would|should|budget|goal|planned)\b"
)
"""Words of a number that nobody measured."""
_STATISTIC = re.compile(r"^(?:max|min|p9\d|p99|std|stdev|limit|before|was|usual|reference|of)\b")


def plain(name: str) -> str:
    """A name in lower case, its signs as spaces."""
    return " ".join(_SPLIT.sub(" ", name.lower()).split())


@lru_cache(maxsize=4096)
def classify(name: str, kind: str) -> str | None:
    """The quantity of a number with that name; `kind` is time, share, clock, power, heat or ""."""
    words = plain(name)
    if not words or len(words) > 80 or _NOT_MEASURED.search(words):
        return None
    if kind in ("clock", "power", "heat"):
        return _device(words, kind)
    if kind == "" and _IMBALANCE.search(words):
        return "imbalance"
    if kind == "" and _LONGEST.match(words):
        return "length"
    if _STATISTIC.match(words) or words.startswith("kernel time"):
        return None  # HTA's kernel time is the whole, idle time included
    short = " ".join(_NOISE.sub(" ", words).split())
    if kind == "":
        return _first(_COUNTED, words) or _bare(short)
    if kind == "share":
        found = _first(_SHARED, words)
        if found is not None:
            return found
    if not short:
        return "step" if "time" in words else None
    return _first(_TIMED, short)


def _bare(short: str) -> str | None:
    return _first(_TIMED, short) if short in _EXACT else None


def _device(words: str, kind: str) -> str | None:
    if kind == "clock":
        if "mem" in words:
            return None
        return "clock_max" if "max" in words or "boost" in words else "clock"
    if kind == "heat":
        return None if "mem" in words or "slowdown" in words else "temperature"
    if "default" in words:
        return "limit_default"
    return "limit" if re.search(r"\b(?:limit|cap|capped|tdp)\b", words) else "power"


def _first(rules: tuple[tuple[str, re.Pattern[str]], ...], words: str) -> str | None:
    return next((name for name, pattern in rules if pattern.search(words)), None)
