"""What stands around every page: header, navigation, theme switch, the state of the browser tab.

In: the pages and the keys of the runs. Out: the layout of the app. All scripts, styles and icons
come from this server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dash_mantine_components as dmc
from dash import dcc, html

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

_REFRESH_MS = 2000
_THEME = {
    "primaryColor": "blue",
    "defaultRadius": "md",
    "fontFamily": "-apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, Helvetica, Arial, "
    "'DejaVu Sans', sans-serif",
    "headings": {"fontWeight": "600"},
}


def icon(name: str) -> Component:
    """An icon of assets/style.css, in the colour of the text around it."""
    return html.Span(className=f"icon icon-{name}", **{"aria-hidden": "true"})


def live_badge() -> Component:
    """Says that the page follows a running job."""
    return dmc.Badge("live", color="blue", variant="dot")


def layout(pages: Sequence[tuple[str, str, str]], keys: Sequence[str]) -> Component:
    """The app. `pages`: (path, title, icon)."""
    return dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Store(id="version"),
            dcc.Store(id="shown"),
            dcc.Store(id="theme"),
            dcc.Interval(id="pulse", interval=_REFRESH_MS, disabled=True),
            dmc.AppShell(
                [
                    dmc.AppShellHeader(_header(keys), px="lg"),
                    dmc.AppShellNavbar(_navigation(pages), p="sm"),
                    dmc.AppShellMain(html.Div(id="content", className="content")),
                ],
                header={"height": 56},
                navbar={"width": 190, "breakpoint": "sm"},
                padding="lg",
            ),
        ],
        theme=_THEME,
        defaultColorScheme="auto",
    )


def _header(keys: Sequence[str]) -> Component:
    return dmc.Group(
        [
            dmc.Group(
                [
                    dmc.Text("diag", fw=700, size="lg", className="brand"),
                    dmc.Select(
                        id="run",
                        data=[{"value": k, "label": k} for k in keys],
                        allowDeselect=False,
                        searchable=len(keys) > 8,
                        w=320,
                        **{"aria-label": "run"},
                    ),
                    html.Div(id="live"),
                ],
                gap="lg",
            ),
            dmc.ColorSchemeToggle(
                id="scheme",
                lightIcon=icon("sun"),
                darkIcon=icon("moon"),
                variant="default",
                size="lg",
                **{"aria-label": "light or dark"},
            ),
        ],
        justify="space-between",
        h="100%",
        wrap="nowrap",
    )


def _navigation(pages: Sequence[tuple[str, str, str]]) -> Component:
    return html.Nav(
        [
            dmc.NavLink(
                id=f"nav-{name}",
                label=title,
                href=path,
                leftSection=icon(name),
                variant="light",
            )
            for path, title, name in pages
        ],
        **{"aria-label": "pages"},
    )
