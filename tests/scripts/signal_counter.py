"""Counts the signals it gets and prints the counts; ends some time after the last one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter

counts: Counter[str] = Counter()
WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def on_signal(number: int, _frame: object) -> None:
    """Count it."""
    counts[signal.Signals(number).name] += 1


def main(seconds: float) -> None:
    """Announce, wait until `seconds` passed after the last signal, print what came."""
    for number in WATCHED:
        signal.signal(number, on_signal)
    print(f"ready {os.getpid()}", flush=True)
    until = time.monotonic() + 30
    seen = 0
    while time.monotonic() < until:
        time.sleep(0.02)
        if sum(counts.values()) != seen:
            seen = sum(counts.values())
            until = time.monotonic() + seconds
    print("counts", " ".join(f"{name}={n}" for name, n in sorted(counts.items())), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
