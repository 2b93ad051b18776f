"""How numbers, ranks and times read in a sentence. Pure text, no decisions."""

from __future__ import annotations

import signal
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number as text when this system has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def spans(ranks: Iterable[int]) -> str:
    """4..7 for consecutive ranks, 0,2,4 for others: "0..3,8,12..15"."""
    out: list[str] = []
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    for run in runs:
        if len(run) > 2:
            out.append(f"{run[0]}..{run[-1]}")
        else:
            out.extend(str(r) for r in run)
    return ",".join(out)


def label(axis: str, members: Iterable[int]) -> str:
    """A group's name: "tp[4..7]"."""
    return f"{axis if axis != 'unknown' else 'group'}[{spans(members)}]"


def ranks_words(ranks: Iterable[int], *, capital: bool = False) -> str:
    """ "rank 5", "ranks 0, 1 and 3", "ranks 8..15 (8 ranks)"."""
    some = sorted(set(ranks))
    head = "rank" if len(some) == 1 else "ranks"
    if capital:
        head = head.capitalize()
    if not some:
        return f"no {head.lower()}"
    if len(some) == 1:
        return f"{head} {some[0]}"
    if len(some) <= 4:
        return f"{head} {', '.join(map(str, some[:-1]))} and {some[-1]}"
    return f"{head} {spans(some)} ({len(some)} ranks)"


def size(number: float) -> str:
    """Bytes with a binary unit: "4.0 TiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(number) < 1024 or unit == "PiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def seconds(value: float) -> str:
    """A duration: "3.2 ms", "1.24 s", "118 s", "1 h 02 min"."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 600:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def clock(time_ns: int) -> str:
    """Local time of day with milliseconds: "14:02:07.312"."""
    moment = datetime.fromtimestamp(time_ns / 1e9).astimezone()
    return moment.strftime("%H:%M:%S.") + f"{moment.microsecond // 1000:03d}"


def count(number: int, word: str) -> str:
    """ "1 step", "12 steps"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def shorten(text: str, most: int = 200) -> str:
    """At most `most` characters, cut at a space, with an ellipsis where something is lacking."""
    if len(text) <= most:
        return text
    cut = text[: most - 3]
    return (cut.rpartition(" ")[0] or cut).rstrip(" .,;:") + "..."
