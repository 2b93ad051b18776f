"""Times as log lines write them.

In: the start of a line. Out: (Stamp, characters it took). A Stamp without a year (glog's MMDD,
syslog's "Nov 12") waits for one: the same year is given to all of a pile, so that order holds.
Times without a zone are read as UTC; all hosts of a job usually write the same zone.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass

_CLOCK = r"(?P<h>\d{2}):(?P<mi>\d{2}):(?P<s>\d{2})(?:[.,](?P<f>\d{1,9}))?"
_ZONE = r"Z|[+-]\d{2}:?\d{2}"
_ISO = rf"(?P<y>\d{{4}})[-/](?P<m>\d{{2}})[-/](?P<d>\d{{2}})[T _]{_CLOCK}(?P<z>{_ZONE})?"
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_NAMED = "|".join(_MONTHS)
_PATTERNS = (
    re.compile(rf"\[?{_ISO}\]?"),
    re.compile(
        rf"\[?(?:\w{{3}} )?(?P<mon>{_NAMED})\s+(?P<d>\d{{1,2}}) {_CLOCK}(?: (?P<y>\d{{4}}))?\]?"
    ),
    re.compile(rf"(?P<m>[01]\d)(?P<d>[0-3]\d) {_CLOCK}"),
)
GLOG = re.compile(rf"(?P<m>[01]\d)(?P<d>[0-3]\d) {_CLOCK}")
"""glog's `E1206 18:44:12.715298746` after its level."""
YEAR = re.compile(
    r"\b(20[1-4]\d)[-/][01]\d[-/][0-3]\d[T _]\d{2}:\d{2}|\b\d{2}:\d{2}:\d{2} (20[1-4]\d)\b"
)


@dataclass(frozen=True)
class Stamp:
    """A point in time; `year` None when the line leaves it out."""

    year: int | None
    month: int
    day: int
    seconds: int
    """Of the day, moved to UTC where the line gives a zone; may be negative."""
    nanos: int

    def at(self, year: int) -> int:
        """Nanoseconds since the epoch, taking `year` where the line has none."""
        days = calendar.timegm((self.year or year, self.month, self.day, 0, 0, 0))
        return (days + self.seconds) * 1_000_000_000 + self.nanos


def _zone(text: str | None) -> int:
    if not text or text == "Z":
        return 0
    digits = text[1:].replace(":", "")
    shift = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -shift if text[0] == "+" else shift


def stamp(found: re.Match[str]) -> Stamp | None:
    """The Stamp of a match of this module's patterns; None when it is no possible date."""
    parts = found.groupdict()
    month = _MONTHS.index(parts["mon"]) + 1 if parts.get("mon") else int(parts["m"])
    day, hour, minute, second = (int(parts[k]) for k in ("d", "h", "mi", "s"))
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    nanos = int((parts["f"] or "").ljust(9, "0")[:9] or 0)
    year = int(parts["y"]) if parts.get("y") else None
    if year is not None and not 1990 <= year <= 2200:
        return None
    seconds = hour * 3600 + minute * 60 + second + _zone(parts.get("z"))
    return Stamp(year, month, day, seconds, nanos)


def leading(text: str) -> tuple[Stamp, int] | None:
    """A time at the start of `text`, and how many characters it takes."""
    first = text[:1]
    if not (first.isdigit() or first == "[" or first.isupper()):
        return None
    for pattern in _PATTERNS:
        found = pattern.match(text)
        if found and (one := stamp(found)):
            return one, found.end()
    return None
