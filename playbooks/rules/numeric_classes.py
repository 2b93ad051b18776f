"""Gradients parameter by parameter against a reference: one class differs, or all by one factor.

In: gradient norms of two runs by parameter, or a table of ratios or differences that a parity check
printed. Out: numeric.gradient-reduction, or numeric.loss-scaling when one size of the layout is the
factor of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from playbooks.measures.quantities import mentioned
from playbooks.measures.runs import fit
from playbooks.rules.naming import root
from playbooks.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playbooks.evidence import Evidence
    from playbooks.finding import Finding, Item
    from playbooks.measures.layout import Layout
    from playbooks.measures.values import Row
    from playbooks.policy import Policy

_LEAST = 3
"""Parameters that a table needs before classes can be told."""


@dataclass
class _Table:
    """Relative distance from the reference by parameter, and the ratio where it is known."""

    apart: dict[str, float]
    ratio: dict[str, float]
    items: dict[str, Item]


def rule(evidence: Evidence, policy: Policy) -> list[Finding]:
    """The first table in which some parameters agree and others do not."""
    layout = evidence.measures.layout
    for table in [*_printed(evidence.measures.rows), *_pairs(evidence)]:
        found = _split(table, layout, policy) or _uniform(table, layout, policy)
        if found is not None:
            return [found]
    return []


def _printed(rows: Sequence[Row]) -> list[_Table]:
    """Ratios and differences that a check printed itself, a section at a time."""
    out: dict[tuple[str, int], _Table] = {}
    for row in rows:
        for value in row.values:
            number = value.number
            if value.quantity not in ("ratio", "difference") or not value.name or number is None:
                continue
            if row.rank not in (None, 0) or len(value.texts) > 1:
                continue
            if "gradient" not in (mentioned(value.label), mentioned(row.about)):
                continue
            table = out.setdefault((row.source, row.section), _Table({}, {}, {}))
            if value.quantity == "ratio":
                table.ratio[value.name] = number
                table.apart[value.name] = abs(number - 1)
            else:
                table.apart.setdefault(value.name, abs(number))
            table.items.setdefault(value.name, row.item)
    return list(out.values())


def _pairs(evidence: Evidence) -> list[_Table]:
    """Two runs that print norms by parameter."""
    out = []
    runs = [r for r in evidence.measures.runs if len(r.names("gradient")) >= _LEAST]
    for first, second in combinations(runs[:20], 2):
        turned = second.reference and not first.reference
        one, other = (second, first) if turned else (first, second)
        table = _Table({}, {}, {})
        for name in one.names("gradient"):
            found = fit(one, other, "gradient", name, most=1)
            if found is not None and name:
                table.ratio[name] = found.ratio
                table.apart[name] = abs(found.ratio - 1)
                table.items[name] = found.first[1].item
        out.append(table)
    return out


def _split(table: _Table, layout: Layout, policy: Policy) -> Finding | None:
    if len(table.apart) < _LEAST:
        return None
    good = [n for n, d in table.apart.items() if d < policy.parity_agree]
    bad = [n for n, d in table.apart.items() if d > policy.parity_apart]
    if not bad or len(good) < 2 or len(good) + len(bad) < 0.9 * len(table.apart):
        return None
    if len(good) < 0.15 * len(table.apart):
        return None
    ratios = [table.ratio[n] for n in bad if n in table.ratio]
    factor = median(ratios) if ratios else None
    named = _class(bad)
    size = _size(factor, layout)
    shown = f", by about {factor:.3g}" if factor is not None else ""
    why = f" ({size})" if size else ""
    return root(
        "numeric.gradient-reduction",
        "likely",
        f"Gradients of {count(len(bad), 'parameter')} ({named}) differ from the reference{shown}"
        f"{why}, while {count(len(good), 'other')} agree.",
        [],
        more=[table.items[bad[0]], table.items[good[0]], table.items[bad[-1]]],
        where=_why(factor),
        excluded=(
            ("numeric.loss-scaling", "other parameters agree"),
            ("numeric.microbatch-normalisation", "other parameters agree"),
            ("numeric.replicas-diverged", "only one class of parameters is concerned"),
            ("numeric.tp-inputs-differ", "the gradients of all others agree, so forward does"),
            ("numeric.tp-rng", "the gradients of all others agree"),
            ("numeric.divergence", "it is there at the first comparison"),
        ),
        formula="; ".join(
            f"{n}: {table.ratio.get(n, table.apart[n]):.3g}" for n in [*bad[:2], good[0]]
        ),
    )


def _uniform(table: _Table, layout: Layout, policy: Policy) -> Finding | None:
    """All parameters by one factor that is the number of ranks, and no other size."""
    ratios = list(table.ratio.values())
    if len(ratios) < _LEAST:
        return None
    factor = median(ratios)
    if (
        factor <= 0
        or any(abs(r / factor - 1) > policy.factor_close for r in ratios)
        or abs(factor - 1) < 0.1
    ):
        return None
    whole = max(factor, 1 / factor)
    ranks = {s for a in ("dp", "world") for s in layout.sizes.get(a, ()) if s > 1}
    micro = layout.sizes.get("accumulation", set())
    if not any(abs(whole / s - 1) < policy.factor_close for s in ranks) or round(whole) in micro:
        return None
    first = next(iter(table.ratio))
    return root(
        "numeric.loss-scaling",
        "likely",
        f"The gradients of all {len(ratios)} parameters differ from the reference by the factor "
        f"{factor:.4g}, which is the number of ranks.",
        [],
        more=[table.items[first]],
        excluded=(
            ("numeric.gradient-reduction", "all parameters have the same factor"),
            ("numeric.microbatch-normalisation", "no accumulation of that size is told"),
            ("numeric.reported-loss", "gradients are off too"),
            ("numeric.divergence", "it is there at the first comparison"),
        ),
        formula=f"median ratio {factor:.4g}; sizes {sorted(ranks)}",
    )


def _why(factor: float | None) -> str | None:
    if factor is None:
        return None
    return "missing" if factor < 1 else "twice"


def _class(names: Sequence[str]) -> str:
    """What the names have in common: their last telling part."""
    ends = sorted({_kind(n) for n in names})
    return ", ".join(ends[:3])


def _kind(name: str) -> str:
    parts = [p for p in name.replace(" ", ".").split(".") if not p.isdigit()]
    plain = [p for p in parts if p not in ("weight", "bias", "layers", "model", "decoder", "h")]
    return ".".join(plain[-2:]) or name


def _size(factor: float | None, layout: Layout) -> str:
    """The size of an axis that the factor equals: "1/tp", "ep"."""
    if factor is None or factor <= 0:
        return ""
    for axis in ("tp", "ep", "cp", "pp", "dp"):
        size = layout.size(axis)
        if size and size > 1:
            if abs(factor * size - 1) < 0.2:
                return f"1/{axis}"
            if abs(factor / size - 1) < 0.2:
                return axis
    return ""
