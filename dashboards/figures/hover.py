"""What a box of the timeline says when pointed at.

In: rows of phases or collectives. Out: one text a row, in plotly's markup with foreign text
escaped. Reads only the rows that are drawn, so a long run costs no more than a short one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dashboards.figures.theme import plain
from playbooks.words import seconds, size

if TYPE_CHECKING:
    from collectors.collected import Collected
    from dashboards.figures.selection import Intervals

_COLUMNS = {
    "phases": ("microbatch", "stage", "device_ns"),
    "collectives": ("op", "seq", "bytes_in", "dtype", "shape", "peer", "state", "wait_ns", "p2p"),
}


def describe(collected: Collected, table: str, boxes: Intervals, kind: list[str]) -> list[str]:
    """One text for each box."""
    picked: list[dict[str, Any]] = (
        collected.tables[table].select(list(_COLUMNS[table])).take(boxes.row).to_pylist()
    )
    build = _phase if table == "phases" else _collective
    out = []
    for i, row in enumerate(picked):
        head, more = build(row, kind[i])
        took = seconds(float(boxes.end[i] - boxes.start[i]) / 1e9)
        step = int(boxes.step[i])
        where = f"rank {boxes.rank[i]}" + (f" · step {step}" if step >= 0 else "")
        took = f"not ended, {took} so far" if boxes.open[i] else took
        lines = [f"<b>{plain(head)}</b> · {took}", where, *(plain(m) for m in more if m)]
        out.append("<br>".join(lines))
    return out


def _phase(row: dict[str, Any], kind: str) -> tuple[str, list[str]]:
    parts = [f"{name} {row[name]}" for name in ("microbatch", "stage") if row[name] is not None]
    device = row["device_ns"]
    return kind, [
        " · ".join(parts),
        "" if device is None else f"on the device: {seconds(device / 1e9)}",
    ]


def _collective(row: dict[str, Any], kind: str) -> tuple[str, list[str]]:
    seq = "" if row["seq"] is None else f" #{row['seq']}"
    tensor = [row["shape"], row["dtype"]]
    if row["bytes_in"] is not None:
        tensor.append(size(row["bytes_in"]))
    peer = row["peer"]
    other = "" if peer is None else f" {'peer' if row['p2p'] else 'root'} rank {peer}"
    wait = row["wait_ns"]
    return f"{row['op'] or 'collective'}{seq}", [
        f"axis {kind}{other}",
        " · ".join(str(t) for t in tensor if t is not None),
        " · ".join(
            [
                *([] if row["state"] is None else [str(row["state"])]),
                *([] if wait is None else [f"host waited {seconds(wait / 1e9)}"]),
            ]
        ),
    ]
