"""Measurements as the events that rules over progress lines read: losses by step, experts' loads.

In: Rows. Out: Events of kind train.step {step, loss, grad_norm, loss_scale} and moe.load {layer,
top, experts}, for logs (CSV, JSON lines, tables) of which no reader makes such events.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playbooks.lines import Event
from playbooks.measures.values import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.measures.values import Row

_FIELDS = {"loss": "loss", "gradient": "grad_norm", "scale": "loss_scale", "rate": "learning_rate"}
_OTHER = re.compile(
    r"(?i)\bval(?!ue\b)|\beval|\btest|\baux|\blocal\b|\bz[_ ]?loss|per rank|ppl|perplex"
)
_SHARE = re.compile(r"(?i)\b(?:share|fraction|frac|top|max)\b")
_LAYER = re.compile(r"(?i)\b(?:moe|layers?|blocks?)[._](\d{1,4})\b")
_EXPERTS = re.compile(r"(?i)expert|router|load|token|count|moe")
_COUNT = re.compile(r"(?i)(\d{1,5}) experts|experts\W{1,3}(\d{1,5})")


def steps(rows: Sequence[Row]) -> list[Event]:
    """Rows of the whole job that have a step and a loss."""
    out = []
    for row in rows:
        step = row.at("step")
        if step is None or row.rank not in (None, 0):
            continue
        fields: dict[str, object] = {"step": step}
        for value in row.values:
            name = _FIELDS.get(value.quantity)
            if name is None or value.name or value.reference or len(value.texts) > 1:
                continue
            if value.number is not None and not _OTHER.search(value.label):
                fields.setdefault(name, value.number)
        if "loss" in fields:
            out.append(Event("train.step", fields, _raw(row)))
    return out


def loads(rows: Sequence[Row]) -> list[Event]:
    """Rows of one layer that tell the largest expert's share, or every expert's load."""
    told = [int(n) for r in rows for f in _COUNT.findall(r.text) for n in f if n]
    experts = max(told, default=0)
    out = []
    for row in rows:
        named = _LAYER.search(row.text)
        layer = row.at("layer")
        layer = int(named[1]) if layer is None and named else layer
        if layer is None:
            continue
        for value in row.values:
            top, count = _top(value.label, value.texts, experts)
            if top is not None:
                fields = {"layer": layer, "top": top, "experts": count}
                out.append(Event("moe.load", fields, _raw(row)))
                break
    return out


def _top(label: str, texts: Sequence[str], experts: int) -> tuple[float | None, int]:
    """(largest share, experts) of a label's values; None when they are no load."""
    numbers = [n for t in texts if (n := number(t)) is not None and n >= 0]
    if len(numbers) > 2 and _EXPERTS.search(label) and sum(numbers) > 0:
        return max(numbers) / sum(numbers), len(numbers)
    if len(numbers) == 1 and _SHARE.search(label) and numbers[0] <= 1:
        return (numbers[0], experts) if _EXPERTS.search(label) else (None, 0)
    return None, 0


def _raw(row: Row) -> dict[str, object]:
    return {
        "time_ns": None,
        "rank": row.rank,
        "host": None,
        "source": row.source,
        "locator": row.item.locator,
        "quote": row.item.quote,
    }
