"""A plan in every form: a table of the best and why for people, diag.plan/1 for programs.

In: a Search, perhaps a ladder and formulas. Out: text, JSON, markdown or HTML.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diag.commands import _output
from trainer.planner import memory, timing
from trainer.planner.search import comm_bytes, room

if TYPE_CHECKING:
    from trainer.planner.explain import Formula
    from trainer.planner.ladder import Rung
    from trainer.planner.search import Ranked, Search

_GIB = 1 << 30
_KINDS = 6
"""Kinds of rejects that a person reads."""


@dataclass
class View:
    """What is shown."""

    search: Search
    top: int
    """Layouts."""
    rungs: list[Rung] = field(default_factory=list)
    formulas: list[Formula] = field(default_factory=list)

    @property
    def shown(self) -> list[Ranked]:
        """The best."""
        return self.search.ranked[: self.top]


def as_json(view: View) -> dict[str, Any]:
    """diag.plan/1."""
    job = view.search.job
    gpu = job.cluster.gpu
    out: dict[str, Any] = {
        "schema": "diag.plan/1",
        "model": {"name": job.shape.name, "parameters": job.shape.parameters},
        "cluster": {
            "gpu": gpu.name, "gpus": job.cluster.count, "gpus_per_node": job.cluster.per_node,
            "memory_bytes": gpu.memory, "peak_flops": gpu.peak, "source": gpu.source,
            "inside_bytes_per_s": job.cluster.inside, "across_bytes_per_s": job.cluster.across,
            "topology": job.cluster.source or None,
        },
        "sequence": job.sequence,
        "global_batch": job.global_batch,
        "dtype": job.numbers.name,
        "configs": [_config(view, one) for one in view.shown],
        "fitting": len(view.search.ranked),
        "rejected": [
            {"layout": one.candidate.as_json(job), "reasons": list(one.reasons)}
            for one in view.search.rejected
        ],
    }  # fmt: skip
    if view.rungs:
        out["ladder"] = [_rung(view, one) for one in view.rungs]
    if view.formulas:
        out["formulas"] = [vars(one) for one in view.formulas]
    return out


def _config(view: View, one: Ranked) -> dict[str, Any]:
    job, candidate = view.search.job, one.candidate
    stages = memory.by_stage(job, candidate)
    low, high = bounds(view, one)
    step = one.timing.step
    return {
        "layout": candidate.as_json(job),
        "memory": {
            "peak_bytes": round(one.peak),
            "by_category": {name: round(size) for name, size in stages[one.stage].items()},
            "by_stage": [
                {
                    "stage": rank,
                    "peak_bytes": round(sum(parts.values())),
                    "by_category": {name: round(size) for name, size in parts.items()},
                }
                for rank, parts in enumerate(stages)
            ],
        },
        "comm_bytes": {axis: round(size) for axis, size in comm_bytes(job, candidate).items()},
        "exposed_comm_s": {axis: sec for axis, sec in one.timing.exposed.items() if sec},
        "bubble": one.timing.bubble,
        "step_time_s": step,
        "step_time_range_s": [low, high],
        "tokens_per_s": job.tokens / step,
        "mfu": timing.mfu(job, step),
        "mfu_range": [timing.mfu(job, high), timing.mfu(job, low)],
        "fits": True,
        "why": why(view, one),
    }


def _rung(view: View, one: Rung) -> dict[str, Any]:
    job = view.search.job
    return {
        "change": one.change,
        "layout": one.candidate.as_json(job),
        "fits": one.fits,
        "reasons": list(one.reasons),
        "peak_bytes": None if one.peak is None else round(one.peak),
        "step_time_s": None if one.timing is None else one.timing.step,
    }


def bounds(view: View, one: Ranked) -> tuple[float, float]:
    """Seconds of a step at the best and at the worst rates."""
    return tuple(  # type: ignore[return-value]  # two rates, two values
        timing.of_step(view.search.job, one.candidate, rates).step
        for rates in (timing.BEST, timing.WORST)
    )


def why(view: View, one: Ranked) -> str:
    """What the time of a step goes into, and what memory is left."""
    job, timed = view.search.job, one.timing
    left = (job.cluster.gpu.memory - one.peak) / _GIB
    where = f"stage {one.stage}" if one.candidate.pp > 1 else "each rank"
    parts = [f"{timed.compute / timed.step:.0%} computes"]
    parts += [f"{timed.bubble:.0%} bubble"] if timed.bubble else []
    slow = sorted(timed.exposed.items(), key=lambda pair: -pair[1])
    parts += [
        f"{axis} exposes {sec / timed.step:.0%}" for axis, sec in slow if sec >= 0.005 * timed.step
    ]
    stages = memory.of_stage(job, one.candidate, one.stage)
    most = max(stages, key=lambda name: stages[name])
    return (
        f"{where} keeps {left:.1f} GiB free, most is {most} ({stages[most] / _GIB:.1f} GiB); of a "
        f"step {', '.join(parts)}"
    )


def text(view: View, *, width: int) -> str:
    """For people."""
    search, job = view.search, view.search.job
    head = (
        f"{job.shape.name}, {job.shape.parameters / 1e9:.2f} B parameters, on {job.cluster.count} "
        f"{job.cluster.gpu.name} ({job.cluster.per_node} a node), sequence {job.sequence}, global "
        f"batch {job.global_batch}, {job.numbers.name}"
    )
    fit = f"{len(search.ranked)} of {search.tried} layouts fit"
    blocks = [[head, fit if search.ranked else f"nothing fits: {search.tried} layouts tried"]]
    if view.shown:
        blocks.append(_table(view))
        blocks.append(
            [
                line
                for number, one in enumerate(view.shown[:3], 1)
                for line in _wrapped(f"why {number}   ", why(view, one), width - 2)
            ]
        )
    blocks += [_ladder(view, width)] if view.rungs else []
    blocks += [_formulas(view, width)] if view.formulas else []
    blocks += [_rejects(view, width)]
    return "\n\n".join("\n".join(f"  {line}" for line in block) for block in blocks if block)


def _table(view: View) -> list[str]:
    job = view.search.job
    rows = [("", "layout", "GiB", "step s (bounds)", "tokens/s/GPU", "MFU", "bubble")]
    for number, one in enumerate(view.shown, 1):
        low, high = bounds(view, one)
        step = one.timing.step
        rows.append(
            (
                str(number),
                str(one.candidate),
                f"{one.peak / _GIB:.1f}",
                f"{step:.3g} ({low:.3g}-{high:.3g})",
                f"{job.tokens / step / job.cluster.count:,.0f}",
                f"{timing.mfu(job, step):.0%}",
                f"{one.timing.bubble:.0%}",
            )
        )
    wide = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(size) if at < 2 else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(row, wide, strict=True))
        )
        for row in rows
    ]


def _ladder(view: View, width: int) -> list[str]:
    lines = ["ladder: one change at a time"]
    for one in view.rungs:
        if one.peak is None or one.timing is None:
            told = "not legal: " + "; ".join(one.reasons)
        else:
            fits = "fits" if one.fits else f"too large, {room(view.search.job) / _GIB:.1f} GiB"
            told = f"{one.peak / _GIB:.1f} GiB ({fits}), {one.timing.step:.3g} s a step"
        lines += _wrapped(f"{one.change:<28} ", f"{one.candidate}: {told}", width - 2)
    return lines


def _formulas(view: View, width: int) -> list[str]:
    lines = ["formulas of layout 1, fullest stage"]
    for one in view.formulas:
        told = f"{one.value} = {one.formula}  [{one.source}]"
        lines += _wrapped(f"{one.name:<28} ", told, width - 2)
    return lines


def _rejects(view: View, width: int) -> list[str]:
    """Kinds of reasons, with how many layouts have each, and one in full."""
    search = view.search
    kinds: Counter[str] = Counter()
    first: dict[str, str] = {}
    nearest = [one for one in search.rejected if one.peak is not None]
    nearest.sort(key=lambda one: one.peak or 0.0)
    for one in [*nearest, *search.rejected]:
        for reason in one.reasons:
            first.setdefault(_kind(reason), f"{one.candidate}: {reason}")
    for one in search.rejected:
        kinds.update({_kind(reason) for reason in one.reasons})
    lines = []
    for kind, count in kinds.most_common(_KINDS):
        lines += _wrapped("not     ", f"{count} layouts, such as {first[kind]}", width - 2)
    if len(kinds) > _KINDS:
        lines.append(f"        {len(kinds) - _KINDS} more kinds of reasons: --format json")
    return lines


def _kind(reason: str) -> str:
    if "GiB, and a " in reason:
        return "memory"
    return re.sub(r"\d+", "N", reason)


def _wrapped(head: str, told: str, width: int) -> list[str]:
    return textwrap.wrap(
        told,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def render(view: View, form: str) -> str:
    """The answer in one of the forms of `_output.FORMATS`."""
    if form == "json":
        return _output.as_text(as_json(view))
    if form == "text":
        return text(view, width=_output.terminal_width())
    told = text(view, width=110)
    if form == "md":
        return "\n".join(["# Plan", "", "~" * 6, told, "~" * 6])
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>diag plan</title>"
        "<style>:root{color-scheme:light dark}body{margin:2rem auto;max-width:80rem;padding:0 1rem}"
        "pre{font:14px/1.45 ui-monospace,monospace;overflow-x:auto}</style></head>"
        f"<body><h1>Plan</h1><pre>{html.escape(told)}</pre></body></html>"
    )
