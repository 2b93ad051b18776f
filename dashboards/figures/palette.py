"""One colour for one meaning, on every page and in both themes.

Phases take the Okabe-Ito colours, axes the muted scheme of Paul Tol: each set keeps its members
apart for the common kinds of colour blindness, and both stay readable on white and on near-black.
A name that is not known here gets the colour of "other", never a colour that means something else.
"""

from __future__ import annotations

from collectors.annotate import PHASES
from playbooks.report.svg import COLOURS

PHASE_COLOURS = COLOURS
"""Colour of each phase of collectors.annotate.PHASES, the same as in the report's pictures."""

AXIS_COLOURS = {
    "pp": "#B59F3B",
    "dp": "#44AA99",
    "cp": "#CC6677",
    "tp": "#AA4499",
    "ep": "#7F8C1F",
    "world": "#6F87A8",
    "unknown": "#9AA3AD",
}
"""Colour of a collective by the axis of its group."""

LINK_COLOURS = {
    "nvlink": "#009E73",
    "pcie-switch": "#2378B5",
    "pcie-switches": "#56B4E9",
    "host-bridge": "#E69F00",
    "node": "#CC79A7",
    "socket": "#D55E00",
    "network": "#8A6FC2",
    "unknown": "#9AA3AD",
}
"""Colour of a link by kind, near to far."""

LINES = ("#2378B5", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A6FC2", "#A1764B")
"""Colours of series that have no meaning of their own, such as ranks or groups."""


def phase_colour(name: str) -> str:
    """Colour of a phase."""
    return PHASE_COLOURS.get(name, PHASE_COLOURS["other"])


def axis_colour(name: str) -> str:
    """Colour of an axis."""
    return AXIS_COLOURS.get(name, AXIS_COLOURS["unknown"])


def link_colour(kind: str) -> str:
    """Colour of a kind of link."""
    return LINK_COLOURS.get(kind, LINK_COLOURS["unknown"])


def line_colour(index: int) -> str:
    """Colour of the series number `index`; they repeat after eight."""
    return LINES[index % len(LINES)]


def phase_order(name: str) -> int:
    """Position of a phase within a step, for legends and stacks."""
    return PHASES.index(name) if name in PHASES else len(PHASES)
