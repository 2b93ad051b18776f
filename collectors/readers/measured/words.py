"""A line in words as labelled values: `loss: 2.31`, `|w| 3.1 3.1`, `"ids": [4, 7]`, `sha1 9f3a..`.

In: bare text. Out: Measured: context (rank, step, ...), and (label, values as they stand) in the
order of the line. A value keeps the characters that were printed, so that equal means equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from collectors.readers.measured import context

VALUES = 512
"""Values of one label that are kept; a longer list is cut."""
_LABEL = 9
"""Words of a label that are kept, the last ones."""
_PAIRS = 64
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?Z?)?|\b\d\d?:\d\d:\d\d(?:[.,]\d+)?"
)
_HEX = r"(?:0x)?(?=[0-9a-fA-F]*\d)(?=[0-9]*[a-fA-F])[0-9a-fA-F]{6,64}"
_NUM = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?"
_TOKEN = re.compile(
    rf"""(?P<norm>\|{{1,2}}[A-Za-z∇Δ][\w. ]{{0,20}}?\|{{1,2}}(?:_\w+)?)
    |(?P<hash>(?<![\w.]){_HEX}(?:\.\.+|…)?(?![\w]))
    |(?P<range>(?<![\w.])\d{{1,7}}\s?(?:\.\.+|\u2013)\s?\d{{1,7}}(?![\w.])|(?<![\w.-])\d{{1,7}}-\d{{1,7}}(?![\w.-]))
    |(?P<number>(?<![\w.]){_NUM}[%x\u00d7]?(?![\w])|(?<![\w.])[-+]?(?:nan|inf|infinity)(?![\w.]))
    |(?P<list>\[[^\[\]()=]{{0,4096}}\]|\((?:\s*[-+\d][-+\d.e]*\s*,){{1,64}}\s*[-+\d.e]*\s*\))
    |(?P<word>[A-Za-z_∇ΔΣ][\w.\-∇]*(?:\[\d+\])?)
    |(?P<null>(?<!\S)(?:-|--|n/a|None)(?!\S))
    |(?P<join>(?:[/~]|->|→|!=|==|\bof\b))
    |(?P<stop>[|;(){{}}<>])
    |(?P<comma>,)
    |(?P<colon>[:=])
    |(?P<other>[\w.]+)""",
    re.VERBOSE | re.IGNORECASE,
)
_TRAILING = {"of", "at", "in", "for", "on", "after", "before", "and", "the", "with"}
OF = " :: "
"""Stands in a label between what a row is of and the name of its column."""
DIGEST = re.compile(r"(?i)(?:hash|sha\w*|md5|crc\w*|digest|checksum|fingerprint|xxh\w*)$")
_COUNT = re.compile(r"(?i)^(?:gpus?|ranks|process|processes|devices|cards)$")
VALUE = re.compile(rf"{_NUM}%?|{_HEX}|[-+]?(?:nan|inf)")
_QUOTES = str.maketrans({"'": " ", '"': " "})
_BARS = re.compile(r"(?<=[\d.]) ?\| ?(?=[-+]?[\d.]+(?: ?\||\s*$))")
"""Bars between numbers alone: values of one label."""
_NODES = re.compile(r"(?i)\b(\d{1,4}) ?nodes? ?[x\u00d7*] ?(\d{1,3}) ?\w*gpus?\b")
_BULLET = re.compile(r"^\s*[-*\u2022]\s+(?=\w)")
_CALLED = re.compile(r"([A-Za-z_]\w*)\(([A-Za-z_]\w*)\)")
_INDEX = re.compile(r"(?<=[\w)])\[[^\[\]]{0,40}\](?=\s*[=:])")
_RANKED = re.compile(r"(?<![\w.:])(\d{1,5}):(?=[\w.+-]*[\w])(?!\d\d:)")
_BY_RANK = re.compile(r"(?i)\b(?:by|per|of each|on each|over) (?:\w+ )?ranks?\b")
_MANY = re.compile(r"\b(\d{1,5})(?: ?[x\u00d7] ?(?:[AHVBL]\d{2,3}\w*|[Gg][Pp][Uu]s?)| GPUs?)\b")
_CUT = re.compile(r"^(\d{1,5})x(\d{1,6})$")
OPAQUE = re.compile(r"^(?=.*\d)[A-Za-z0-9]{4,64}$")


@dataclass
class Measured:
    """What one line says."""

    context: dict[str, str] = field(default_factory=dict)
    values: list[tuple[str, list[str], str | None]] = field(default_factory=list)
    """(label, values, rank): the rank only where one line tells of several, "3" or "dp3"."""
    head: str = ""
    """The first words of the line that name a subject, such as a parameter."""


_SPOTS = ("rank", "step", "epoch", "tp", "dp", "pp", "layer", "batch", "microbatch")


class _Parser:
    """Holds the label and the values that are being put together."""

    def __init__(self) -> None:
        self.out = Measured()
        self.label: list[str] = []
        self.values: list[str] = []
        self.joined = False
        self.outside: list[list[str]] = []
        """Labels as they stood before each open bracket."""
        self.rank: str | None = None
        """The rank that the line named last, once it named two."""

    def word(self, text: str) -> None:
        """A word: it ends the values before it, and names those that follow."""
        known = context.joined(text)
        if known is not None and known[0] in context.AXES and (self.label or self.out.values):
            known = None  # "grad_norm tp4 0.3" tells runs apart
        if known is not None and (known[0] not in self.out.context or known[0] == "rank"):
            self.flush()
            self._place(*known)
            return
        if self.label and DIGEST.search(self.label[-1]) and OPAQUE.match(text):
            self.values.append(text)
            return
        if len(self.values) == 1 and self.values[0].isdigit() and _COUNT.match(text):
            self.out.context.setdefault("world", self.values[0])
            self.values, self.label = [], []
            return
        self.flush()
        if text.lower() == "x":
            self.label = []
        else:
            self.label.append(text)

    def feed(self, text: str) -> None:
        """Goes through the tokens of a text."""
        for token in _TOKEN.finditer(text):
            self._token(token.lastgroup or "", token.group())
            self.joined = self.joined and bool(self.values)

    def _token(self, kind: str, said: str) -> None:
        if kind in ("word", "norm"):
            if said == "of" and self.values:
                self.part_of()
            else:
                self.word(said)
        elif kind in ("hash", "number"):
            self.values.append(said)
        elif kind == "null":
            self.values.append("-")
        elif kind == "list":
            self.several(said)
        elif kind == "join":
            self.joined = bool(self.values)
        elif kind == "comma":
            self.comma()
        elif kind == "range":
            self.flush()
            self.label.append(said)
        else:
            self._other(kind, said)

    def _other(self, kind: str, said: str) -> None:
        """Marks, and words that begin with a digit: "4x8" is a batch cut into microbatches."""
        cut = _CUT.match(said) if kind == "other" else None
        if cut is None:
            self.stop(said if kind == "stop" else " ")
            return
        self.flush()
        self.out.context.setdefault("accumulation", cut[1])
        self.out.context.setdefault("micro_batch", cut[2])

    def several(self, text: str) -> None:
        """A list in brackets: the values of one label."""
        parts = [p for p in re.split(r"[,\s]+", text[1:-1]) if p]
        if any(p.isalpha() and p.lower() not in ("nan", "inf") for p in parts):
            self.feed(text[1:-1])  # "[epoch 3]"
            self.flush()
            return
        good = [p for p in parts if VALUE.fullmatch(p)]
        if parts and len(good) >= len(parts) - 1:
            self.values.extend(good[:VALUES])
            self.flush()

    def part_of(self) -> None:
        """ "12 of 30": two values of one label, the second called `... of`."""
        label = list(self.label)
        self.flush()
        self.label = self.label or [*label, "of"]

    def stop(self, mark: str) -> None:
        """A mark that ends values; without values it ends the label, but for brackets."""
        if self.values:
            self.flush()
            self.outside = self.outside if mark == "(" else []
        elif mark in "|;{}<>":
            self.label = []
        if mark == "(":
            self.outside = [*self.outside[-3:], list(self.label)]
        elif mark == ")" and self.outside:
            before = self.outside.pop()
            inside = self.label[len(before) :] if self.label[: len(before)] == before else []
            self.label = [*before, *inside] if len(inside) == 1 else before or self.label

    def comma(self) -> None:
        """Ends a context's value and a label; a list of values goes on."""
        if not self.values:
            self.label = []
        elif context.key(self.label) is not None:
            self.flush()
            self.label = []

    def flush(self) -> None:
        """Put away the values under their label, as context or as a measurement."""
        values, label = self.values, self.label
        self.values = []
        if not values:
            return
        self.label = []
        if all(v == "-" for v in values):
            return
        found = context.key(label)
        again = found is not None and _is_coordinate(label)
        if found is not None and found[0] in _SPOTS and self._leads(values):
            self.values, self.label = values[:1], label
            self.flush()
            self.values = values[1:]
            self.flush()
            return
        if found is None or not self._places(found[0], values, again=again):
            self._keep(label, values)
            return
        rest = label[: -found[1]]
        while rest and rest[-1].lower() in _TRAILING:
            rest.pop()
        self.label = rest
        self._place(found[0], values[0].replace(",", ""), coordinate=_is_coordinate(label))

    def _leads(self, values: list[str]) -> bool:
        """Whether the first of several values is a place and the others are what stands there."""
        if len(values) < 2 or self.joined or not re.fullmatch(r"\d{1,9}", values[0]):
            return False
        return any(not re.fullmatch(r"\d{1,9}", v) for v in values[1:])

    def _place(self, key: str, value: str, *, coordinate: bool = False) -> None:
        if (key == "rank" or coordinate) and key in self.out.context:
            tag = "" if key == "rank" else key
            if self.rank is None:
                first = tag + self.out.context[key]
                self.out.values = [(n, v, r or first) for n, v, r in self.out.values]
            self.rank = tag + value
            return
        self.out.context[key] = value

    def _keep(self, label: list[str], values: list[str]) -> None:
        if not self.out.head:
            self.out.head = " ".join(label)
        if not label and self.rank is not None and self.out.values:
            label = [self.out.values[-1][0]]  # the label that the first rank's value had
        if len(self.out.values) < _PAIRS and (
            label or len(values) > 1 or "rank" in self.out.context
        ):
            name = " ".join(label[-_LABEL:])
            self.out.values.append((name, values[:VALUES], self.rank))

    def _places(self, key: str, values: list[str], *, again: bool) -> bool:
        if key in self.out.context and key != "rank" and not again:
            return False
        if len(values) > 2 or (len(values) == 2 and not self.joined):
            return False
        if key in context.FRACTIONS:
            return values[0][:1].isdigit()
        return re.fullmatch(r"\d{1,3}(?:,\d{3})+|\d{1,12}", values[0]) is not None


def _is_coordinate(label: list[str]) -> bool:
    """Whether the label is of one rank on an axis ("dp rank 3"), not of the axis' size."""
    low = " ".join(label[-2:]).lower()
    return low.endswith((" rank", "_rank", "-rank"))


def _plain(text: str) -> str:
    """Indices of arrays left out; runs told apart by their GPUs in one line ("1 x A100 ... 4 x
    A100 ...") as words of a run; values listed as rank:value as those of ranks."""
    if "[" in text:
        text = _INDEX.sub("", text)
    if text.count("|") > 1 and len(_BARS.findall(text)) > 1:
        text = _BARS.sub(" ", text)
    if "node" in text:
        text = _NODES.sub(lambda m: f"{int(m[1]) * int(m[2])} GPUs", text)
    text = _BULLET.sub("", text)
    if "(" in text:
        text = _CALLED.sub(r"\1 \2", text)
    if "rank" in text and len(_RANKED.findall(text)) > 1 and _BY_RANK.search(text):
        text = _RANKED.sub(r" rank\1 ", text)
    return _MANY.sub(r"gpus\1 ", text) if len(_MANY.findall(text)) > 1 else text


def read(text: str) -> Measured:
    """The labelled values of one line; empty when it has none."""
    parser = _Parser()
    parser.feed(_TIME.sub(" ", _plain(text.translate(_QUOTES))))
    parser.flush()
    return parser.out
