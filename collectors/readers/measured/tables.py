"""Rows of a table under its header line: CSV, `a | b`, tabs, columns set with blanks.

In: bare lines in order. Out: Measured of a row whose cells stand under a known header; None for any
other line. A header is a line of names, without a value, of which one is a word of the field; a
line "... columns: a, b, c" is one too. A header that no row fits is forgotten.
"""

from __future__ import annotations

import re

from collectors.readers.measured import context
from collectors.readers.measured.words import DIGEST, OF, OPAQUE, VALUE, Measured, read

_WIDE = re.compile(r"\s{2,}|\t")
RULE = re.compile(r"^[\s|:+=-]{3,}$")
_SAID = re.compile(r"\bcolumns?\b(?: are)?\s*[:=]\s*(.+)$", re.IGNORECASE)
_FIELD = re.compile(
    r"(?i)rank|step|iter|epoch|loss|grad|norm|param|name|weight|module|layer|hash|sha|digest|"
    r"checksum|batch|gpus?\b|\bdp\b|\btp\b|\bpp\b|accum|coef|ratio|\blr\b|world|sample|ids?\b|run\b|"
    r"\bstate\b|\bsaved\b|\brestored\b|\bloaded\b|\breference\b|\bsingle\b|[tdpce]p\d+\b"
)
_WORDS = re.compile(r"[\s|,;/:='\"(){}\[\]]+")
_ASSIGNED = re.compile(r"[:=]\s*[-+\d\[]")
TITLE = "|"
"""Head of a Measured that stands for a header line."""
_BRACKETS = re.compile(r"\([^()]*\)")
_AXIS = re.compile(r"(?i)\b(tp|dp|pp|cp|ep|world|gpus|ga|accum) ?= ?(\d+)(?=\s|\||,|$)")
_NORM = re.compile(r"\|{1,2}([A-Za-z]\w*)\|{1,2}(?!\w)")
_RANKS = re.compile(
    r"(?i)(?:(?:step|name|param\w*|tensor|iteration|epoch)[\s|]+)?(?:(?:tp |dp |pp |global )?"
    r"(?:rank|gpu|r)[ _#]?\d{1,6}[\s|,]*){2,64}"
)
"""A header of ranks alone, over rows that begin as they like."""
_EACH = re.compile(r"(?i)(tp|dp|pp|)\s?(?:global )?\b(?:rank|gpu|r)[ _#]?(\d{1,6})")
_CELLS = 64
_EXPERT = re.compile(r"(?i)^(?:e|expert|exp)[ _]?\d{1,4}$")
_LIST = re.compile(r"^\[[^\[\]]*\]$")
_MISSES = 40
"""Lines that fit no row after which a header is forgotten."""
_BY_RANK = re.compile(r"(?i)^(?:global[_ ]?)?(?:tp |dp )?(?:rank|gpu|r)[ _#]?(\d{1,6})\b")


def _splits(text: str) -> dict[str, list[str]]:
    """The cells of a line by each way in which it may be cut."""
    plain = _AXIS.sub(r"\1\2", _NORM.sub(r"norm of \1", text.strip()))
    out: dict[str, list[str]] = {}
    if plain.count("|") >= 1 and "||" not in plain:
        out["bar"] = [c.strip() for c in plain.strip("|").split("|")]
    if "," in plain:
        out["comma"] = [c.strip().strip("\"'") for c in plain.split(",")]
    if "bar" not in out and "comma" not in out:
        wide = [c for c in _WIDE.split(plain) if c]
        if len(wide) > 1:
            out["wide"] = wide
        out["blank"] = plain.split()
    return {k: c for k, c in out.items() if 2 <= len(c) <= _CELLS}


def _is_value(cell: str) -> bool:
    return VALUE.fullmatch(cell) is not None or _LIST.match(cell) is not None


class Tables:
    """Holds the last header of one file."""

    def __init__(self) -> None:
        self.header: dict[str, list[str]] = {}
        self.missed = 0
        self.rows = 0

    def feed(self, text: str, *, prose: bool) -> Measured | None:
        """The row that this line is, if it is one; a header is remembered. `prose` lines state
        something, so columns set with blanks are none."""
        if RULE.match(text):
            return None
        found = _SAID.search(text)
        if found:
            cells = [c.strip() for c in found.group(1).split(",")]
            self._begin({"said": cells})
            return None
        ranks = _RANKS.fullmatch(text.strip().strip("|").strip())
        if ranks is not None:
            self._begin({"ranks": [a.lower() + n for a, n in _EACH.findall(text)]})
            return Measured(head=TITLE)
        if "ranks" in self.header:
            row = _by_ranks(text, self.header["ranks"])
            if row is not None:
                self.rows += 1
                self.missed = 0
                return row
        elif self.header:
            row = self._row(text)
            if row is not None:
                self.rows += 1
                self.missed = 0
                return row
        cuts = _splits(text)
        bare = _AXIS.sub(r"\1\2", _BRACKETS.sub(" ", text))
        told = sum(VALUE.fullmatch(w) is not None for w in _WORDS.split(bare))
        valued = told > 0
        drawn = valued and (text.lstrip().startswith("|") or (text.count("|") > 1 and told < 2))
        strict = {k: c for k, c in cuts.items() if k == "bar" and drawn} if valued else cuts
        pure = not _ASSIGNED.search(bare) and not text.rstrip().endswith(":")
        names = {k: c for k, c in strict.items() if pure and not any(map(_is_value, c))}
        if set(names) == {"blank"} and len(_FIELD.findall(text)) < 2:
            names = {}  # a sentence
        if prose and not {"bar", "comma"} & set(names):
            names = {}
        if names and _FIELD.search(text) and all(len(x) <= 40 for c in names.values() for x in c):
            self._begin(names)
            return Measured(head=TITLE)
        self.missed += 1
        if self.missed > _MISSES:
            self.header = {}
        return None

    def _begin(self, header: dict[str, list[str]]) -> None:
        if self.rows >= 3 and self.missed == 0 and "said" in self.header and "said" not in header:
            return  # a row of names only inside a running table
        self.header, self.missed, self.rows = header, 0, 0

    def _row(self, text: str) -> Measured | None:
        for kind, cells in _splits(text).items():
            for name, header in self.header.items():
                if kind in ("bar", "comma") and name not in (kind, "said"):
                    continue
                if len(header) == len(cells) and self._fits(header, cells):
                    return self._measured(header, cells)
                unnamed = len(header) + 1 == len(cells) and not _is_value(cells[0])
                if unnamed and all(_is_value(c) or c == "-" for c in cells[1:]):
                    return self._measured(["", *header], cells)
        return None

    def _fits(self, header: list[str], cells: list[str]) -> bool:
        good = sum(
            _is_value(c) or c == "-" or _digest(h, c) for h, c in zip(header, cells, strict=True)
        )
        plain = all(len(c) <= 60 and "=" not in c and ": " not in c for c in cells)
        return plain and good >= 1 and good >= (len(cells) - 1) / 2

    def _measured(self, header: list[str], cells: list[str]) -> Measured:
        out = Measured()
        subject: list[str] = []
        pairs: list[tuple[str, str]] = []
        for name, cell in zip(header, cells, strict=True):
            key = context.key(name.split()) if name else None
            whole = re.fullmatch(r"\d{1,12}", cell)
            fraction = key is not None and key[0] in context.FRACTIONS and VALUE.fullmatch(cell)
            if key is not None and (fraction or (key[1] == len(name.split()) and whole)):
                out.context.setdefault(key[0], cell)
            elif _is_value(cell) or cell == "-" or _digest(name, cell):
                pairs.append((name, cell))
            elif (known := context.joined(cell)) is not None:
                out.context.setdefault(*known)
            else:
                subject.append(cell)
        out.head = " ".join(subject)
        experts = [cell for name, cell in pairs if _EXPERT.match(name)]
        if len(experts) > 2:
            out.values.append(("experts load", experts, None))
            pairs = [(name, cell) for name, cell in pairs if not _EXPERT.match(name)]
        for name, cell in pairs:
            by_rank = _BY_RANK.match(name)
            listed = _LIST.match(cell)
            values = re.split(r"[,\s]+", cell[1:-1].strip()) if listed else [cell]
            column = "" if by_rank else name
            label = f"{out.head}{OF}{column}" if subject else column
            out.values.append((label, values, by_rank.group(1) if by_rank else None))
        return out


def _by_ranks(text: str, ranks: list[str]) -> Measured | None:
    """A row that ends in one value for each rank of the header."""
    parts = [p for p in re.split(r"[\s|,]+", text.strip()) if p]
    values = parts[len(parts) - len(ranks) :]
    if len(parts) < len(ranks) or not all(
        VALUE.fullmatch(v) or v == "-" or (OPAQUE.match(v) and len(v) >= 6) for v in values
    ):
        return None
    before = " ".join(parts[: len(parts) - len(ranks)])
    out = read(before)
    if not out.context and out.values:
        return None
    bare = re.fullmatch(r"\d{1,12}", before)
    if bare:
        out.context["step"] = before
    label = " ".join(w for w in before.split() if not w.strip(":").isdigit() and w != "step")
    label = label.strip(": ") if "step" not in label else ""
    out.values = [(label, [v], r) for v, r in zip(values, ranks, strict=True) if v != "-"]
    return out


def _digest(name: str, cell: str) -> bool:
    last = name.rsplit(maxsplit=1)[-1] if name.strip() else ""
    return DIGEST.search(last) is not None and OPAQUE.match(cell) is not None
