"""The Dash app: one shell, one file a page, every run that the command line named.

In: paths of run directories. Out: a Dash app, or a server on 127.0.0.1 that ends with Ctrl-C.
It reads and shows; it writes nothing, loads nothing from elsewhere, and opens no path that a
request names: a run is a key into what the command line gave.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

from dash import ClientsideFunction, Dash, Input, Output, State, ctx, no_update
from flask import abort, request

from dashboards import shell
from dashboards.address import Address, parse
from dashboards.figures.selection import Selection, ranks_of, step_span
from dashboards.pages import artifacts, overview, timeline, topology
from dashboards.parts import notice, rank_options
from dashboards.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PAGES: tuple[Any, ...] = (overview, timeline, topology, artifacts)
HOST = "127.0.0.1"
PORT = 8050
_OURS = ("/_dash", "/assets/", "/_favicon", "/_reload-hash")
_NAMES = ("127.0.0.1", "localhost", "[::1]")


def create(run_paths: Sequence[Path], runs: Runs | None = None) -> Dash:
    """The app on `run_paths`; `runs` replaces how they are read (for tests and embedding)."""
    runs = runs or Runs(run_paths)
    app = Dash(
        __name__,
        title="diag",
        update_title="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        assets_folder="assets",
        add_log_handler=False,
    )
    app.layout = shell.layout([(p.PATH, p.TITLE, p.ICON) for p in PAGES], runs.keys())
    _guard(app)
    _route(app, runs)
    _refresh(app, runs)
    _filters(app)
    app.clientside_callback(
        ClientsideFunction("diag", "watch"), Output("theme", "data"), Input("content", "id")
    )
    for page in PAGES:
        page.register(app, runs)
    return app


def _guard(app: Dash) -> None:
    """Only our pages exist, and only for a browser that asks for this machine by name.

    The second keeps a web page elsewhere from reading the dashboard through DNS rebinding.
    """

    def check() -> None:
        name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if name not in _NAMES:
            abort(403)
        known = [page.PATH for page in PAGES]
        if request.path not in known and not request.path.startswith(_OURS):
            abort(404)

    app.server.before_request(check)


def _route(app: Dash, runs: Runs) -> None:
    """Address to page. The run selector and the address are one state, so one callback has both."""

    def route(
        path: str | None, search: str | None, picked: str | None, _version: Any, shown: Any
    ) -> list[Any]:
        address = parse(path, search)
        if ctx.triggered_id == "run" and picked != runs.find(address.run):
            address = Address(address.page, picked)
        key = runs.find(address.run)
        page = next((p for p in PAGES if address.page == p.PATH), None)
        links = [value for p in PAGES for value in (address.to(p.PATH), address.page == p.PATH)]
        if key is None or page is None:
            what = (
                "There is no such page."
                if page is None
                else f"There is no run called {address.run!r}."
            )
            return [address.search(), None, notice(what, "Choose one above."), None, *links]
        view = runs.view(key)
        now = {"page": page.PATH, "run": key, "search": address.search(), "shape": view.shape}
        if shown == now:
            return [no_update, key, no_update, no_update, *links]
        return [address.search(), key, page.layout(view, address.chosen), now, *links]

    app.callback(
        [
            Output("url", "search"),
            Output("run", "value"),
            Output("content", "children"),
            Output("shown", "data"),
            *(
                output
                for page in PAGES
                for output in (
                    Output(f"nav-{page.ICON}", "href"),
                    Output(f"nav-{page.ICON}", "active"),
                )
            ),
        ],
        Input("url", "pathname"),
        Input("url", "search"),
        Input("run", "value"),
        Input("version", "data"),
        State("shown", "data"),
    )(route)


def _refresh(app: Dash, runs: Runs) -> None:
    """Every two seconds while the job runs: has anything changed?"""

    def tick(_count: int, search: str | None, before: Any) -> list[Any]:
        key = runs.find(parse(None, search).run)
        if key is None:
            return [no_update, True, None]
        view = runs.view(key)
        version = f"{key} {view.version}"
        return [
            no_update if version == before else version,
            not view.live,
            shell.live_badge() if view.live else None,
        ]

    app.callback(
        [
            Output("version", "data"),
            Output("pulse", "disabled"),
            Output("live", "children"),
        ],
        Input("pulse", "n_intervals"),
        Input("url", "search"),
        State("version", "data"),
    )(tick)

    def options(_version: Any, search: str | None) -> Any:
        key = runs.find(parse(None, search).run)
        if key is None:
            return [no_update, no_update]
        collected = runs.view(key).collected
        steps = step_span(collected) or (0, 0)
        return [rank_options(ranks_of(collected)), str(steps[1])]

    app.callback(
        [Output("ranks", "data"), Output("step-last", "placeholder")],
        Input("version", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )(options)


def _filters(app: Dash) -> None:
    """The filter bar writes the address; everything else follows the address."""

    def write(
        ranks: list[str], first: Any, last: Any, path: str, search: str | None, shown: Any
    ) -> list[Any]:
        before = parse(path, search)
        chosen = Selection(
            tuple(int(r) for r in ranks) or None,
            first if isinstance(first, int) else None,
            last if isinstance(last, int) else None,
        )
        after = Address(before.page, before.run, chosen)
        if after.search() == before.search() or not shown:
            return [no_update, no_update]
        # What is on the page stays: the page is told that it already shows this address.
        return [after.search(), {**shown, "search": after.search()}]

    app.callback(
        [
            Output("url", "search", allow_duplicate=True),
            Output("shown", "data", allow_duplicate=True),
        ],
        Input("ranks", "value"),
        Input("step-first", "value"),
        Input("step-last", "value"),
        State("url", "pathname"),
        State("url", "search"),
        State("shown", "data"),
        prevent_initial_call=True,
    )(write)


def listen(port: int = PORT) -> socket.socket:
    """A socket on 127.0.0.1: `port`, or a free one when that is taken (0: any free one)."""
    for wanted in (port, 0):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, wanted))
        except OSError:
            sock.close()
            if wanted == 0:
                raise
        else:
            sock.listen(64)
            return sock
    raise AssertionError("unreachable: port 0 binds or raises")


def serve(
    run_paths: Sequence[Path],
    port: int = PORT,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until Ctrl-C; `ready` is called once with the URL."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create(run_paths)
    with listen(port) as sock:
        server = make_server(
            HOST, sock.getsockname()[1], app.server, threaded=True, fd=sock.fileno()
        )
        if ready is not None:
            ready(f"http://{HOST}:{server.port}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            server.server_close()
