"""The dashboard in Chromium: any console error, page error or failed request fails the test."""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dashboard_synthetic as synthetic
import pytest
from werkzeug.serving import make_server

from collectors.collected import Collected, empty
from dashboards.app import HOST, create, listen
from dashboards.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH"),
]
PAGES = ("Overview", "Timeline", "Topology", "Artifacts")
WAIT = 20_000


def damaged() -> Collected:
    raise ValueError(f"run.json: not JSON {synthetic.HOSTILE}")


MAKE = {
    "healthy": synthetic.healthy,
    "stalled": synthetic.stalled,
    "hostile": synthetic.hostile,
    "placed": synthetic.placed,
    "long": lambda: synthetic.healthy(ranks=8, steps=200),
    "empty": empty,
    "damaged": damaged,
}


@pytest.fixture(scope="module")
def live() -> Collected:
    """A running job; tests change what it holds."""
    made = synthetic.healthy()
    made.run.update(state="running", ended_ns=None, exit_code=None)
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    for name in (*MAKE, "live"):
        (path / name).mkdir()
    return path


@pytest.fixture(scope="module")
def server(root: Path, live: Collected) -> Iterator[str]:
    """URL of a server on synthetic runs."""
    make = {**MAKE, "live": lambda: live}
    paths = [root / name for name in make]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    runs = Runs(paths, read=lambda p: make[p.name](), judge=synthetic.report_for)
    app = create(paths, runs)
    with listen(0) as sock:
        port = sock.getsockname()[1]
        running = make_server(HOST, port, app.server, threaded=True, fd=sock.fileno())
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://{HOST}:{port}"
        running.shutdown()
        thread.join()
        running.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One profile for all tests, so that scripts are fetched and compiled once."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        one = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield one.new_context(viewport={"width": 1440, "height": 900})
        one.close()


@contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    """A page on `url`; what went wrong in it fails at the end."""
    wrong: list[str] = []
    with browser.new_page() as page:
        page.set_default_timeout(WAIT)
        page.under_way = set()
        page.on("request", lambda r: page.under_way.update({r}))
        page.on("requestfinished", lambda r: page.under_way.difference_update({r}))
        page.on("requestfailed", lambda r: page.under_way.difference_update({r}))
        page.add_init_script(BOXES)
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: wrong.append(f"page error: {e}"))
        page.on("requestfailed", lambda r: wrong.append(f"{r.failure} {r.url}"))
        page.on(
            "response", lambda r: wrong.append(f"{r.status} {r.url}") if r.status >= 400 else None
        )
        page.on(
            "request",
            lambda r: (
                None if r.url.startswith((url[:16], "data:", "blob:")) else wrong.append(r.url)
            ),
        )
        page.goto(url)
        page.locator(".mantine-NavLink-root[data-active]").wait_for()
        yield page
        settle(page)
        assert page.evaluate("window.pwned") is None
        assert wrong == []


def settle(page: Any) -> None:
    """Wait until no request is under way and every plot is drawn."""
    quiet = 0
    while quiet < 3:
        page.wait_for_timeout(60)
        drawing = page.locator(".dash-graph--pending").count()
        quiet = 0 if page.under_way or drawing else quiet + 1


def go(page: Any, name: str) -> None:
    page.get_by_role("link", name=name).or_(page.locator(f"#nav-{name.lower()}")).first.click()
    page.locator(f"#nav-{name.lower()}[data-active]").wait_for()
    page.wait_for_function("document.getElementById('content').innerText.length > 30")
    settle(page)


BOXES = """window.boxes = name =>
    (document.querySelector(`#${name} .js-plotly-plot`)?.data ?? [])
        .filter(t => t.type === "bar").reduce((n, t) => n + t.customdata.length, 0)"""


def boxes(page: Any, plot: str) -> int:
    """Number of drawn boxes of a plot."""
    found: int = page.evaluate(f"boxes('{plot}')")
    return found


def until_boxes(page: Any, count: int) -> None:
    page.wait_for_function("n => boxes('timeline') === n", arg=count)


@pytest.mark.parametrize("run", ["placed", "hostile", "long", "empty", "damaged"])
def test_every_page_of_every_run(server: str, browser: Any, run: str) -> None:
    with opened(browser, f"{server}/?run={run}") as page:
        settle(page)
        for name in (*PAGES[1:], PAGES[0]):
            go(page, name)
            body = page.locator("#content").inner_text()
            assert len(body) > 30, f"{name} of {run} is blank"
            assert "Traceback" not in body
        assert f"run={run}" in page.url


def test_the_verdict_is_shown_with_evidence_and_advice(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/?run=stalled") as page:
        page.get_by_text("Rank 1 is stuck reading its data").wait_for()
        card = page.locator(".answer").inner_text()
        for word in (
            "hang.rank-stalled",
            "loader.py:88",
            "stacks-0.json",
            "nfsstat",
            "hang.slow-not-dead",
        ):
            assert word in card


def test_hostile_text_is_shown_as_text(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/?run=hostile") as page:
        page.get_by_text("Rank 1 is stuck").wait_for()
        assert synthetic.HOSTILE in page.locator(".answer").inner_text()
        go(page, "Artifacts")
        assert synthetic.HOSTILE in page.locator("#artifacts").inner_text()
        assert page.locator("#content img").count() == 0
    with opened(browser, f"{server}/?run=%3Cimg%20src=x%20onerror=alert(1)%3E") as page:
        page.get_by_text("There is no run called").wait_for()
        assert page.locator("#content img").count() == 0


def test_an_empty_run_says_what_is_missing(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/?run=empty") as page:
        page.get_by_text("there is no time to divide").wait_for()
        assert page.locator(".js-plotly-plot").count() == 0
        go(page, "Topology")
        page.get_by_text("no topology of its nodes").wait_for()
    with opened(browser, f"{server}/?run=damaged") as page:
        page.get_by_text("not JSON").wait_for()


def test_the_theme_switches_and_the_figures_follow(server: str, browser: Any) -> None:
    ink = "document.querySelector('#step-time .js-plotly-plot').layout.font.color"
    with opened(browser, f"{server}/?run=healthy") as page:
        page.locator("#step-time .js-plotly-plot").wait_for()
        settle(page)
        light = page.evaluate(ink)
        page.locator("#scheme").click()
        page.wait_for_function(f"({ink}) !== '{light}'")
        assert page.evaluate("document.documentElement.dataset.mantineColorScheme") == "dark"
        settle(page)
        page.reload()
        page.locator("#step-time .js-plotly-plot").wait_for()
        settle(page)
        assert page.evaluate(ink) != light
        page.locator("#scheme").click()
        page.wait_for_function(f"({ink}) === '{light}'")


def test_ranks_and_steps_are_filtered_and_stand_in_the_link(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/timeline?run=healthy") as page:
        until_boxes(page, 4 * 20 * 6)
        page.locator("#ranks").click()
        page.get_by_role("option", name="rank 2").click()
        until_boxes(page, 20 * 6)
        page.keyboard.press("Escape")
        page.locator("#step-first").fill("3")
        page.locator("#step-last").fill("4")
        until_boxes(page, 2 * 6)
        assert "ranks=2" in page.url
        assert "steps=3-4" in page.url
        go(page, "Overview")
        assert "ranks=2" in page.url
        page.go_back()
        until_boxes(page, 2 * 6)
        link = page.url
    with opened(browser, link) as page:
        until_boxes(page, 2 * 6)
        assert page.locator("#step-first").input_value() == "3"


def test_a_box_says_what_it_is(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/timeline?run=healthy&ranks=1&step=3") as page:
        until_boxes(page, 6)
        area = page.locator("#timeline .nsewdrag").first.bounding_box()
        page.mouse.move(area["x"] + area["width"] * 0.6, area["y"] + area["height"] * 0.35)
        hover = page.locator("#timeline .hoverlayer .hovertext")
        hover.wait_for()
        assert "backward" in (hover.text_content() or "")
        assert "rank 1" in (hover.text_content() or "")


def drag(page: Any, start: float, end: float) -> None:
    settle(page)
    area = page.locator("#timeline .nsewdrag").first.bounding_box()
    y = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + area["width"] * start, y)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * end, y, steps=5)
    page.mouse.up()


RANGE = "document.querySelector('#timeline .js-plotly-plot').layout.xaxis.range"


def test_zooming_in_turns_the_raster_into_boxes_and_back(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/timeline?run=long") as page:
        page.get_by_text("more than the screen can show").wait_for()
        assert boxes(page, "timeline") == 0
        drag(page, 0.5, 0.55)
        page.get_by_text("more than the screen can show").wait_for(state="detached")
        assert 100 < boxes(page, "timeline") < 3000
        low, high = page.evaluate(RANGE)
        assert 9 < low < high < 12
        area = page.locator("#timeline .nsewdrag").first
        area.dblclick()
        page.get_by_text("more than the screen can show").wait_for()
        assert page.evaluate(RANGE)[1] > 19


def test_a_live_run_grows_while_zoom_and_selection_stay(
    server: str, browser: Any, live: Collected, root: Path
) -> None:
    with opened(browser, f"{server}/timeline?run=live&ranks=0-1") as page:
        page.locator("#live").get_by_text("live").wait_for()
        until_boxes(page, 2 * 20 * 6)
        drag(page, 0.2, 0.7)
        page.wait_for_function(f"({RANGE})[0] > 0.2")
        zoom = page.evaluate(RANGE)
        settle(page)
        before = boxes(page, "timeline")
        live.tables.update(synthetic.healthy(steps=12).tables)
        (root / "live" / "more").write_text("x")
        # Half of the steps are gone, so what the zoomed stretch holds is less than before.
        page.wait_for_function("n => boxes('timeline') < n", arg=before)
        settle(page)
        assert page.evaluate(RANGE) == zoom
        assert "ranks=0-1" in page.url
        live.run["state"] = "finished"
        (root / "live" / "end").write_text("x")
        page.locator("#live:empty").wait_for(state="attached")


def test_the_plan_colours_the_topology(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/topology?run=placed") as page:
        page.get_by_text("Groups of tp").wait_for()
        page.locator("#axis").get_by_text("dp", exact=True).click()
        page.get_by_text("Groups of dp").wait_for()
        page.locator("#node").click()
        page.get_by_role("option", name="node1").click()
        page.locator("#topology text", has_text="rank 15").first.wait_for()


def test_choosing_another_run_shows_that_run(server: str, browser: Any) -> None:
    with opened(browser, f"{server}/?run=healthy&ranks=1") as page:
        page.get_by_text("nothing wrong in what was seen").wait_for()
        page.locator("#run").click()
        page.get_by_role("option", name="stalled").click()
        page.get_by_text("Rank 1 is stuck").wait_for()
        assert page.url.endswith("/?run=stalled")
