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
DIGEST = re.compile(r"(?i)(?:hash|sha\w*|md5|crc\w*|digest|checksum|fingerprint|xxh\w*)$")
_COUNT = re.compile(r"(?i)^(?:gpus?|ranks|processes|devices|cards)$")
VALUE = re.compile(rf"{_NUM}%?|{_HEX}|[-+]?(?:nan|inf)")
_QUOTES = str.maketrans({"'": " ", '"': " "})
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

    def several(self, text: str) -> None:
        """A list in brackets: the values of one label."""
        parts = [p for p in re.split(r"[,\s]+", text[1:-1]) if p]
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
            self.label = before or self.label

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
        if found is None or not self._places(found[0], values, again=again):
            self._keep(label, values)
            return
        rest = label[: -found[1]]
        while rest and rest[-1].lower() in _TRAILING:
            rest.pop()
        self.label = rest
        self._place(found[0], values[0].replace(",", ""), coordinate=_is_coordinate(label))

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


def _gpus(text: str) -> str:
    """Runs told apart by their GPUs in one line ("1 x A100 ... 4 x A100 ...") as words of a run."""
    return _MANY.sub(r"gpus\1 ", text) if len(_MANY.findall(text)) > 1 else text


def read(text: str) -> Measured:
    """The labelled values of one line; empty when it has none."""
    parser = _Parser()
    for token in _TOKEN.finditer(_TIME.sub(" ", _gpus(text.translate(_QUOTES)))):
        kind, said = token.lastgroup, token.group()
        if kind in ("word", "norm"):
            if said == "of" and parser.values:
                parser.part_of()
            else:
                parser.word(said)
        elif kind in ("hash", "number"):
            parser.values.append(said)
        elif kind == "null":
            parser.values.append("-")
        elif kind == "list":
            parser.several(said)
        elif kind == "join":
            parser.joined = bool(parser.values)
        elif kind == "comma":
            parser.comma()
        elif kind == "other" and (cut := _CUT.match(said)) is not None:
            parser.flush()
            parser.out.context.setdefault("accumulation", cut[1])
            parser.out.context.setdefault("micro_batch", cut[2])
        elif kind == "range":
            parser.flush()
            parser.label.append(said)
        else:
            parser.stop(said if kind == "stop" else " ")
        parser.joined = parser.joined and bool(parser.values)
    parser.flush()
    return parser.out
