"""How every figure looks, light and dark, and what stands in its place when there is no data.

In: a figure, a theme. Out: the same figure, laid out. Foreign text goes through `plain`, because
plotly reads a subset of HTML in labels and hovers: a log line with a tag must be shown as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import plotly.graph_objects as go

Theme = Literal["light", "dark"]

_INK = {"light": "#343a40", "dark": "#ced4da"}
_FAINT = {"light": "#e9ecef", "dark": "#373a40"}
_HOVER = {"light": "#ffffff", "dark": "#25262b"}
FONT = (
    "-apple-system, BlinkMacSystemFont, Segoe UI, Roboto, Helvetica, Arial, DejaVu Sans, sans-serif"
)


@dataclass(frozen=True)
class Missing:
    """There is nothing to draw: what is missing, and what would bring it."""

    what: str
    how: str = ""


@dataclass(frozen=True)
class Drawn:
    """A figure, with one sentence that says what a reader must know about it ("" when nothing)."""

    figure: go.Figure
    note: str = ""
    legend: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    """(title, ((name, colour), ...)) of what the page explains beside the figure, as plain text."""


def theme_of(scheme: str | None) -> Theme:
    """The theme that the browser reports; light until it has."""
    return "dark" if scheme == "dark" else "light"


def ink(theme: Theme) -> str:
    """Colour of text and of marks that carry no meaning."""
    return _INK[theme]


def faint(theme: Theme) -> str:
    """Colour of grid lines."""
    return _FAINT[theme]


def plain(text: object) -> str:
    """Foreign text as plotly shows it literally."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def axis(theme: Theme, **more: Any) -> dict[str, Any]:
    """An axis with a quiet grid."""
    base = {
        "gridcolor": faint(theme),
        "linecolor": faint(theme),
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        "title": {"standoff": 8},
    }
    return {**base, **more}


def finish(fig: go.Figure, theme: Theme, height: int, **layout: Any) -> go.Figure:
    """Lay `fig` out; `height` in CSS pixels; `layout` overrides."""
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": ink(theme)},
        "hoverlabel": {
            "bgcolor": _HOVER[theme],
            "bordercolor": faint(theme),
            "font": {"family": FONT, "size": 12, "color": ink(theme)},
            "align": "left",
            "namelength": -1,
        },
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "xanchor": "left",
            "x": 0,
            "bgcolor": "rgba(0,0,0,0)",
        },
        "template": "none",
        "hovermode": "closest",
        "dragmode": "zoom",
    }
    fig.update_layout({**base, **layout})
    return fig
