"""From the label of a value to its quantity, the thing it is of, and the run it belongs to.

In: "layers.0.attn.qkv grad norm ref". Out: Named("gradient", "layers.0.attn.qkv", "ref").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_QUANTITIES = (
    ("difference", r"diff(?:erence)?s?|delta|errors?|deviation|abs_?err|rel_?err|mismatch"),
    ("ratio", r"ratio|factor|quotient"),
    ("scale", r"scale|loss[ _-]scale|grad[ _-]scale|scaler"),
    ("rate", r"lr|learning[ _-]?rate"),
    ("optimizer", r"optim\w*|exp_avg\w*|moments?|adam\w*|momentum|master"),
    ("random", r"seeds?|rng\w*|dropout\w*|masks?|random|cuda[ _]state|philox|generator"),
    ("gradient", r"grads?|gradients?|gnorm|grad_?norms?|∇\w*|\|+g\w*\|+(?:_\w+)?|g_?norm|dw"),
    ("auxiliary", r"aux\w*|balanc\w*|load_balancing\w*|z_?loss"),
    (
        "data",
        (
            r"input\w*|tokens?|ids|\w*_ids|sample_id|indices|indexes|index|sampler|idx|samples?|batch\w*|data\w*|"
            r"consumed\w*|cursor|position|offset|order|docs?|documents?|permutation|perm|rows?"
        ),
    ),
    ("activation", r"hidden\w*|activations?|outputs?|out|logits|normed|acts?"),
    ("loss", r"loss\w*|\w+_loss|nll|ce|lm|ppl|perplexity|xent"),
    (
        "weight",
        (
            r"weights?|params?|parameters?|\|+[wθp]\w*\|+(?:_\w+)?|theta|w|model|state_dict|wnorm|"
            r"pnorm|param_\w+|weight_\w+|w_?norm"
        ),
    ),
    ("step_time", r"time|elapsed|ms|seconds|throughput|tflops?"),
)
_MATCH = tuple((name, re.compile(rf"(?i)^(?:{pattern})$")) for name, pattern in _QUANTITIES)
_PLAIN = {"norm", "sum", "hash", "sha1", "sha", "sha256", "md5", "crc32", "digest", "checksum"}
_PLAIN |= {"l2", "max", "mean", "abs", "value", "the", "of", "after", "before", "step", "at", "all"}
_PLAIN |= {
    "per",
    "rank",
    "ranks",
    "tp",
    "dp",
    "pp",
    "printed",
    "logged",
    "reported",
    "total",
    "local",
}
_PLAIN |= {
    "has",
    "is",
    "was",
    "are",
    "reduction",
    "norms",
    "first",
    "train",
    "training",
    "rel",
    "fingerprint",
    "crc",
}
_PARTS = re.compile(
    r"(?i)^(?:embed\w*|lm_head|head|final_norm|\w*norm\d*|router\w*|gate\w*|mlp\w*|attn\w*|qkv\w*|"
    r"wte|wpe|ln_\w+|ln\d*|experts?|shared_experts?|tied|dense\w*|o_proj|\w+_proj|moe|bias|"
    r"\w*layer_?norm\w*|fc\d*|q|k|v|wq|wk|wv|wo|w1|w2|w3|up|down|out|linear\w*|proj\w*)$"
)
_WHOLE = re.compile(
    r"^(?:(?:global|total|local|param\w*|weight\w*|grad\w*|[wgp]|l2|inf|update)_?norms?|out|"
    r"norms?|moe|k|q|v)$"
)
"""Words that look like a module and are a measure, or nothing."""
_REFERENCE = re.compile(
    r"(?i)^(?:ref\w*|baseline|expected|golden|single|one|dense|sequential|unsharded|1gpu|truth|"
    r"tp1|dp1|pp1|serial|recomput\w*|recalculat\w*)$"
)
_WORD = re.compile(r"[^\s=:()/,@]+")


VARIANT = re.compile(
    r"(?i)^(?:ours?|actual|got|tests?|parallel|ddp|fsdp\d?|zero\d?|[tdpce]p\d*|[ab]|run\w*|new|old|this|"
    r"current|n?gpus?\d*|x\d+|(?:ga|acc|accum|gas)\d+|distributed|sharded|copy\w*|ours\w*|mine|them|theirs)$"
)
"""Words that tell one run from another and not what is printed."""


@dataclass(frozen=True)
class Named:
    """What a label says."""

    quantity: str
    """"" when the label has no word for it."""
    name: str
    """Parameter, module or other subject; "" for the whole model."""
    rest: str
    """Remaining words, such as "ours" or "A"."""

    @property
    def reference(self) -> bool:
        """Whether the words call it the reference."""
        return any(_REFERENCE.match(w) for w in self.rest.split())


def is_variant(word: str) -> bool:
    """Whether a word tells runs apart."""
    return VARIANT.match(word) is not None or _REFERENCE.match(word) is not None


def run_words(rest: str) -> str:
    """What tells the run; all words for a reference are one."""
    words = rest.split()
    if any(_REFERENCE.match(w) for w in words):
        return "reference"
    return " ".join(w for w in words if VARIANT.match(w))


_SETTING = re.compile(r"(?i)^(tp|dp|pp|cp|ep|gpus?|x|ga|acc|accum|gas)(\d{1,6})$")
_SETTING_NAMES = {"gpu": "world", "gpus": "world", "x": "world"}
_SETTING_NAMES |= dict.fromkeys(("ga", "acc", "accum", "gas"), "accumulation")


def settings(rest: str) -> dict[str, float]:
    """Sizes that the words of a run name: "dp8", "ga4", "gpus2"."""
    out = {}
    for word in rest.split():
        if word.lower() in ("single", "serial", "1gpu"):
            out["world"] = 1.0
        found = _SETTING.match(word)
        if found and int(found[2]) > 0:
            name = found[1].lower()
            out[_SETTING_NAMES.get(name, name)] = float(found[2])
    return out


def _quantity(word: str) -> str:
    low = word.lower().strip("*'`")
    dotted = "." in low and not low.startswith("grad_")
    parts = [low] if dotted else [low, *re.split(r"[_-]", low)]
    for name, pattern in _MATCH:
        if any(pattern.match(p) for p in parts):
            return name
    return ""


@lru_cache(maxsize=4096)
def read(label: str) -> Named:
    """The quantity, name and rest of a label. First quantity of the list that any word has."""
    words = [p for w in _WORD.findall(label) for p in _pieces(w)]
    parts = [w for i, w in enumerate(words) if _is_part(w, words[i - 1] if i else "")]
    others = [w for w in words if w not in parts]
    told = _best(" ".join(others), others)
    if not told and parts:
        told = "weight" if any(p.endswith(("weight", "bias")) for p in parts) else ""
        if told and all(is_variant(w) or w.lower() in _PLAIN or w.isdigit() for w in others):
            told = ""  # a parameter's name alone does not say what of it is printed
    rest = [w for w in others if not _quantity(w) and w.lower() not in _PLAIN]
    return Named(told, " ".join(parts), " ".join(rest))


_OF_PART = re.compile(
    r"(?i)^(.+?)_(grad(?:ient)?(?:_?norm)?|loss|w?norm|hash|sha\w*|md5|checksum|digest)$"
)
_OF_TENSOR = re.compile(r"(?i)^(.+?)\.(grad(?:\.\w*norm)?|grad_norm)$")
_TAGGED = re.compile(
    r"(?i)^(?:ref|reference|baseline|expected|golden|ours|actual|single|ddp|fsdp|[tdpce]p\d+)$"
)


def _pieces(word: str) -> list[str]:
    """ "ref_grad_norm" as "ref" and "grad_norm", "router_grad" as "router" and "grad"."""
    dotted = _OF_TENSOR.match(word)
    if dotted is not None:
        return [dotted[1], dotted[2].replace(".", "_")]
    part = _OF_PART.match(word)
    if part is not None and _PARTS.match(part[1]) and not _quantity(part[1]):
        return [part[1], part[2]]
    first, _, rest = word.partition("_")
    if rest and _TAGGED.match(first):
        return [first, rest]
    head, _, last = word.rpartition("_")
    tagged = _TAGGED.match(last) or (last in ("A", "B") and _quantity(head))
    return [head, last] if head and tagged else [word]


def _is_part(word: str, before: str) -> bool:
    """Whether a word names a module or parameter; the norm of a gradient is none."""
    low = word.lower()
    if low.startswith(("grad_", "gradient", "loss_")):
        return False
    if "." in word.strip("."):
        return any(c.isalpha() for c in word)
    if low in ("norm", "norms"):
        return before.lower() in ("final", "input", "post", "pre", "layer", "rms", "attention")
    return _PARTS.match(word) is not None and not _WHOLE.match(low)


_MEASURED = re.compile(
    r"(?i)(?:^|[\s_(])(?:ms|us|s|secs?|seconds|msec|time|mhz|temp\w*|watts?|power|util\w*|clocks?|wait\w*|"
    r"stall\w*|idle|moe|routed)"
    r"(?=$|[\s_)])"
)
"""A unit or gauge: "data_ms" is a time, not data, and "W temp" no weight."""


def _best(text: str, words: list[str]) -> str:
    if _MEASURED.search(text):
        return "step_time"
    if re.search(r"(?i)loss[ _-]scale", text):
        return "scale"
    if re.search(r"(?i)learning[ _-]?rate", text):
        return "rate"
    if re.search(r"(?i)\b(?:difference|diff\b|ratio|max (?:abs|rel))", text):
        return "ratio" if re.search(r"(?i)\bratio", text) else "difference"
    found = {q for w in words if (q := _quantity(w))}
    return next((name for name, _ in _QUANTITIES if name in found), "")


_OF = (
    r"(?:sha\w*|hash\w*|digest|checksum|norms?|sums?|md5|crc\w*|fingerprint)s? (?:of|over) "
    r"(?:[\w-]+ ){0,3}?"
)
_MENTIONS = (
    ("gradient", r"grad(?:ient)?s?\b(?![ _-]?accum)|\|g\||\|g\b|\bg_ref|norm of g\b"),
    ("data", r"sample[ _]ids?|batch(?:es)?\b(?! size)|inputs?[ _]ids|token ids|indices|sampler\b"),
    ("random", r"rng\b|dropout mask|generator\b|\bseed per"),
    ("activation", r"\boutputs? of|hidden states|activations?\b"),
    ("weight", r"weights?\b|param\w*|state_dict|\|w\||replicas"),
    ("loss", r"\bloss"),
)


@lru_cache(maxsize=1024)
def mentioned(text: str) -> str:
    """The quantity that a heading speaks of: what it names the digest or norm of, else the first
    of the list that it has a word for."""
    for start in (_OF, r""):
        for name, pattern in _MENTIONS:
            if re.search(rf"(?i){start}\b(?:{pattern})" if start else rf"(?i){pattern}", text):
                return name
    return ""
