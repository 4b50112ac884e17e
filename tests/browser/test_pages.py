"""Pages of jobs that a stack on this machine doesn't have: many, long, and odd ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect
from support.api_harness import Api
from support.gallery import LONG_NAME, ended, trained, with_fleet, with_logs, with_machines
from support.harness import RedisServer
from support.pages import Dashboard, PageLog, Site

from vcasgd.settings import Settings
from vcasgd.store.ledger.job import JobState

pytestmark = pytest.mark.slow

JOBS = 60
WIDTHS = (1280, 390)


class Gallery:
    def __init__(self, api: Api) -> None:
        self.api = api
        for number in range(JOBS):
            ended(api, name=f"old-{number:03}")
        why = "evaluate raised NotImplementedError: the task has to define it, and does not. "
        self.failed = api.submit(name=LONG_NAME)
        api.finish(self.failed, JobState.FAILED, reason=3 * why + 300 * "x")
        self.long = trained(api, {"accuracy": 0.98, "loss": 0.2}, name=LONG_NAME)
        many = {f"metric-{number:02}": 0.5 + number / 50 for number in range(18)}
        metric = {"name": "f1", "mode": "max"}
        self.many = trained(
            api,
            many | {"f1": 0.9, "perplexity": 12.0},
            logged=("masked", "tokens-per-batch"),
            name="many",
            stop={"metric": metric},
        )
        self.loss_only = trained(api, {"loss": 0.3, "count": 100.0}, name="lm")
        ended(api, name="newest")
        with_machines(api, self.long)
        with_fleet(api, self.loss_only)
        self.notes = {"batch-exceeds-data": "one step", "momentum-starts-again": "a few steps"}
        for kind, text in self.notes.items():
            api.jobs.note(self.loss_only, kind, text)
        api.jobs.set_waiting({self.loss_only: {"text": "2 machines are booting"}})
        with_logs(api, self.long)
        for version in (3, 6):
            api.store_checkpoint(self.long, version)
        best, _ = api.store_checkpoint(self.long, 9)
        self.best = best


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    folder = tmp_path_factory.mktemp("gallery")
    server = RedisServer(folder / "ledger", durable=False)
    api = Api(folder / "api", server, as_command=True).start()
    yield Gallery(api)
    api.end()
    server.end()


@pytest.fixture(scope="module")
def site(gallery: Gallery) -> Site:
    """The API behind the pages, in place of that of a stack."""
    site = Site(Settings(home=gallery.api.home))
    site.url, site.token = gallery.api.url, gallery.api.token
    return site


def left_end(element: Locator) -> float:
    return element.bounding_box()["x"]


def right_end(element: Locator) -> float:
    box = element.bounding_box()
    return box["x"] + box["width"]


@pytest.mark.ci
def test_list_of_many_jobs_with_long_names_fits_each_width(
    dashboard: Dashboard, gallery: Gallery
) -> None:
    page = dashboard.page
    for width in (1440, *WIDTHS):
        page.set_viewport_size({"width": width, "height": 900})
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(25)

        # Active jobs come first, although newer ones have ended
        first = rows.first
        expect(first).to_contain_text("lm")
        expect(page.get_by_text(f"{JOBS + 5} jobs")).to_be_visible()
        expect(first.locator("td").first.get_by_role("checkbox")).to_be_visible()
        expect(first).to_contain_text("loss0.3")

        # The row with a long name shows as much as the others
        long = rows.filter(has=page.get_by_title(gallery.long))
        for shown in ("running", "0%", "accuracy"):
            text = long.get_by_text(shown, exact=True)
            expect(text).to_be_visible()
            assert right_end(text) <= width
        state = page.locator("[data-tone=failed]")
        reason = page.get_by_text("evaluate raised")
        name = page.get_by_title(gallery.failed).locator("span")
        assert right_end(name.last) < min(left_end(state), left_end(reason))
        assert reason.evaluate("it => it.scrollWidth <= it.clientWidth")
        table = page.get_by_role("region", name="Jobs", exact=True)
        assert table.evaluate("it => it.scrollWidth <= it.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert dashboard.serious_findings() == []


@pytest.mark.ci
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_of_a_job_with_a_long_name_fit_each_width(
    dashboard: Dashboard, gallery: Gallery, width: int
) -> None:
    page = dashboard.page
    page.set_viewport_size({"width": width, "height": 900})
    tabs = ("overview", "workers", "events", "logs", "checkpoints", "yaml")
    paths = [f"/jobs/{gallery.failed}", *(f"/jobs/{gallery.long}?tab={tab}" for tab in tabs)]
    compared = f"/compare?jobs={gallery.long},{gallery.many},{gallery.loss_only}"
    for path in (*paths, compared):
        dashboard.open(path)
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator("[class*=Skeleton]")).to_have_count(0)

        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert right_end(page.locator("main h1")) <= width
        for tab in page.get_by_role("tab", selected=True).all():
            assert right_end(tab) <= width
        assert dashboard.serious_findings() == [], path
    # Of three jobs side by side, each is on the screen
    assert right_end(page.locator("thead th").last) <= width


@pytest.mark.ci
@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_the_fleet_the_store_and_workers_fit_each_width(
    dashboard: Dashboard, gallery: Gallery, width: int
) -> None:
    page = dashboard.page
    page.set_viewport_size({"width": width, "height": 900})
    job = gallery.loss_only
    shown = {
        "/fleet": ("Pools", "Machines", "Offers"),
        "/store": ("Servers", "Models"),
        f"/jobs/{job}?tab=workers": ("Workers",),
    }
    for path, tables in shown.items():
        dashboard.open(path)
        for name in tables:
            table = page.get_by_role("region", name=name, exact=True).locator("table")
            heading, first = table.locator("th:visible"), table.locator("tbody tr").first
            expect(first).to_be_visible()
            # Its last column ends as far from the edge as its first one begins
            assert table.evaluate("it => it.scrollWidth <= it.parentElement.clientWidth"), name
            sides = [heading.first, "paddingLeft"], [heading.last, "paddingRight"]
            assert {
                cell.evaluate(f"it => getComputedStyle(it).{side}") for cell, side in sides
            } == {"16px"}
        if path == "/fleet":
            expect(page.get_by_text("refused; next try in")).to_be_visible()
        assert dashboard.serious_findings() == [], path
    # And a worker says what it does, and how fast
    expect(page.get_by_role("cell", name="training subtask 1025").first).to_be_visible()
    expect(page.get_by_role("cell", name="224.7").first).to_be_visible()


def test_only_notes_to_act_on_are_warnings(dashboard: Dashboard, gallery: Gallery) -> None:
    page = dashboard.page
    dashboard.open(f"/jobs/{gallery.loss_only}")

    notices = page.locator("main [role=status]")
    expect(notices).to_have_text(["2 machines are booting", "One step"])
    expect(page.get_by_text("A few steps.", exact=True)).to_be_visible()


def test_every_metric_has_a_chart_to_smooth_and_to_zoom(
    dashboard: Dashboard, gallery: Gallery
) -> None:
    page = dashboard.page

    # A job that reports only a loss has a chart of its validation
    dashboard.open(f"/jobs/{gallery.loss_only}")
    charts = page.locator("figure:has(canvas)")
    expect(charts).to_have_count(2)
    expect(charts.nth(1)).to_contain_text("Validation loss")

    # The metric that ranks models comes first; all of 20, and what steps log, are one click away
    dashboard.open(f"/jobs/{gallery.many}")
    expect(charts).to_have_count(5)
    expect(charts.nth(1)).to_contain_text("Validation f1")
    page.get_by_role("button", name="Show all 23 charts").click()
    expect(charts).to_have_count(23)
    expect(charts.nth(21)).to_contain_text("Logged masked")

    # When the user drags over a chart, all of them show that part of the time
    scale = page.locator("[class*=tick]")
    expect(scale.first).to_have_text("0 s")
    chart = charts.nth(1).locator("canvas")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=3)
    page.mouse.up()
    reset = page.get_by_role("button", name="Reset zoom")
    expect(reset).to_be_visible()
    expect(scale.first).not_to_have_text("0 s")
    labels = scale.all_inner_texts()
    assert len(labels) == len(set(labels)), "no label is repeated"
    reset.click()
    expect(scale.first).to_have_text("0 s")

    smoothing = page.get_by_role("slider", name="Smoothing")
    smoothing.press("ArrowRight")
    expect(page.get_by_text("Smoothing 0.01")).to_be_visible()

    # On a small screen, names are whole, and no label of the axis is cut
    page.set_viewport_size({"width": 390, "height": 900})
    expect(charts.nth(1).get_by_text("Validation f1")).to_be_visible()
    name = charts.nth(22).get_by_text("Logged tokens-per-batch")
    assert name.evaluate("it => it.scrollWidth <= it.clientWidth")
    edge = right_end(scale.first.locator(".."))
    assert all(right_end(label) <= edge for label in scale.all())


def test_machines_are_shown_from_submission_and_as_what_they_became(
    dashboard: Dashboard, gallery: Gallery
) -> None:
    page = dashboard.page
    dashboard.open(f"/jobs/{gallery.long}")

    given = page.locator("li[data-machine=i-given]")
    expect(given).to_have_attribute("data-state", "given")
    expect(given).to_contain_text("given to other-abc123")
    # Its time before the job isn't shown
    expect(dashboard.timeline_span("i-given", "running")).to_have_attribute("x", "0")
    expect(page.locator("g[data-lane=i-given] rect")).to_have_count(1)
    expect(page.locator("path[data-arrow]")).to_have_count(1)
    expect(page.locator("path[data-arrow=i-newer]")).to_have_count(1)
    expect(page.get_by_text("5 so far, 1 evicted, 1 killed")).to_be_visible()


def test_logs_have_levels_and_are_searched_on_the_server(
    dashboard: Dashboard, gallery: Gallery
) -> None:
    page = dashboard.page
    dashboard.open(f"/jobs/{gallery.long}?tab=logs")
    lines = page.get_by_label("Lines", exact=True).locator("> div")
    expect(lines).to_have_count(45)
    expect(lines.filter(has_text="UserWarning")).to_have_attribute("data-level", "warning")

    page.get_by_label("Search lines").fill("NO SUCH")

    expect(lines).to_have_count(1)
    expect(lines.locator("mark")).to_have_text("no such")
    expect(lines).to_contain_text("ValueError: no such column")


def test_best_and_last_models_are_marked_and_downloaded(
    dashboard: Dashboard, gallery: Gallery
) -> None:
    page = dashboard.page
    dashboard.open(f"/jobs/{gallery.long}?tab=checkpoints")
    marked = page.get_by_role("row").filter(has_text="best")
    expect(marked).to_have_count(1)
    expect(marked).to_contain_text("epoch 9")

    with page.expect_download() as download:
        page.get_by_role("link", name="Download best").click()

    assert gallery.best in download.value.suggested_filename
    expect(page.get_by_role("link", name="Download last")).to_be_visible()


def test_what_has_the_focus_is_never_below_the_header(
    dashboard: Dashboard, gallery: Gallery
) -> None:
    page = dashboard.page
    page.set_viewport_size({"width": 1280, "height": 500})
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.get_by_role("checkbox").last.focus()
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        hidden = page.evaluate(
            """() => {
              const header = document.querySelector("header");
              const focused = document.activeElement;
              if (header.contains(focused) || focused === document.body) return false;
              const bottom = header.getBoundingClientRect().bottom;
              return focused.getBoundingClientRect().top < bottom - 1;
            }"""
        )
        assert not hidden


def test_a_lost_connection_stops_clocks_and_buttons(
    dashboard: Dashboard, gallery: Gallery, page_log: PageLog
) -> None:
    page = dashboard.page
    dashboard.open(f"/jobs/{gallery.long}")
    pause = page.get_by_role("button", name="Pause")
    expect(pause).to_be_enabled()

    page.context.set_offline(True)

    banner = page.get_by_role("alert")
    expect(banner).to_contain_text("Offline: the API has not answered since")
    expect(pause).to_have_attribute("aria-disabled", "true")
    time = page.get_by_text(re.compile(r"^running for \d"))
    before = time.inner_text()
    page.wait_for_timeout(2500)
    assert time.inner_text() == before
    expect(page.locator("figure canvas").first).to_be_visible()

    page.context.set_offline(False)

    expect(banner).to_have_count(0)
    expect(pause).not_to_have_attribute("aria-disabled", "true")
    expect(time).not_to_have_text(before)
    assert all("net::" in each for each in page_log.complaints)
    page_log.complaints.clear()
