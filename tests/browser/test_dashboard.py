"""The dashboard in a real Chromium, on a real stack."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, Request, expect
from safetensors.torch import load_file
from support.pages import Dashboard, PageLog, Site, held_example
from support.stacks import kill_part
from support.waiting import await_truth

from vcasgd.client import Client
from vcasgd.spec.access import Scope

pytestmark = pytest.mark.slow

View = tuple[Literal["light", "dark"], int]
#: Theme and width in pixels: the first two have each of them once.
VIEWS: tuple[View, ...] = (("light", 1440), ("dark", 390), ("dark", 1440), ("light", 390))
#: Maximum size of all scripts of the first page, compressed.
SCRIPT_BYTES = 400_000
#: Records all connection states that the page shows.
REMEMBER = """() => {
  window.states = [];
  const record = () => states.push(document.querySelector("[role=status]")?.textContent.trim());
  const options = {childList: true, characterData: true, subtree: true};
  new MutationObserver(record).observe(document.body, options);
}"""


@pytest.fixture(scope="module")
def job(site: Site) -> str:
    return site.submit()


@pytest.mark.ci
def test_job_from_submission_to_model(dashboard: Dashboard, tmp_path: Path) -> None:
    page = dashboard.page

    text, code, hold = held_example(tmp_path)
    job = dashboard.submit(text, code)

    # Then its progress updates live, and each machine has a lane
    await_truth(lambda: dashboard.fraction() > 5)
    await_truth(lambda: len(dashboard.machines("running")) == 2)
    before = set(dashboard.machines("running"))

    victim = min(before)
    page.get_by_role("button", name=f"Evict {victim}").click()
    page.get_by_role("menuitem", name="Kill without notice").click()

    # Then its lane turns red, and an arrow leads to its replacement
    await_truth(lambda: victim in dashboard.machines("dead"))
    red = dashboard.timeline_span(victim, "dead").evaluate("bar => getComputedStyle(bar).fill")
    assert red == "rgb(224, 49, 49)"
    await_truth(lambda: set(dashboard.machines("running")) - before)
    (newcomer,) = set(dashboard.machines("running")) - before
    expect(page.locator(f"path[data-arrow={newcomer}]")).to_have_count(1)
    hold.unlink()

    link = page.get_by_role("link", name="Download last")
    expect(link).to_be_visible()
    with page.expect_download() as download:
        link.click()
    path = tmp_path / "model.safetensors"
    download.value.save_as(path)
    assert sum(each.numel() for each in load_file(path).values()) > 1000
    expect(dashboard.figure("Progress")).to_have_text("100.0%")
    assert dashboard.site.client.job(job).kills == 1


def test_editor_completes_fields_and_values(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.open("/submit")
    editor = page.get_by_role("textbox", name="job.yaml", exact=True)
    with page.expect_response("**/schema/job"):
        editor.fill("name: x\nupdate:\n  ")

    editor.press("Control+End")
    for typed, offered in (("codec", "codec"), ("bf", "bfloat16")):
        editor.press_sequentially(typed)
        expect(page.get_by_role("option", name=offered)).to_be_visible()
        # A new list ignores keys for 75 ms to prevent accidental choices.
        page.wait_for_timeout(200)
        editor.press("Enter")

    expect(editor).to_contain_text("codec: bfloat16")


def test_chart_shows_values_under_the_pointer(dashboard: Dashboard, job: str) -> None:
    page, site = dashboard.page, dashboard.site
    site.client.job(job).wait(240)
    dashboard.open(f"/jobs/{job}")
    curve = page.locator("figure").filter(has_text="Validation accuracy")
    expect(curve.locator("canvas")).to_be_visible()
    first, *_ = (each.metrics["accuracy"] for each in site.client.job(job).evaluations)
    caption = curve.locator("figcaption")
    expect(caption).not_to_contain_text("at 0 s")

    # When the pointer hovers above the machines, at the start of the job
    lanes = page.locator("svg[aria-label$=' machines']")
    lanes.hover(position={"x": 2, "y": 2})

    # Then the curves show their values at that time, with a line through all of them
    expect(caption).to_contain_text(f"{first:.1%}")
    expect(caption).to_contain_text("at 0 s")
    expect(page.locator("[class*=crosshair]")).to_have_count(4)


def test_ticked_jobs_are_compared_side_by_side(dashboard: Dashboard, job: str) -> None:
    # Given a job that has ended, and one with other settings
    page, site = dashboard.page, dashboard.site
    other = site.submit(epochs=1, seed=7)
    done = site.client.job(job).wait(240)

    dashboard.open("/")
    for each in (job, other):
        page.get_by_role("checkbox", name=f"Compare {each}").check()
    page.get_by_role("link", name="Compare 2 jobs").click()

    # Then their curves are in the same charts, and the table has what differs
    expect(page.locator("figure canvas")).to_have_count(2)
    row = page.get_by_role("row")
    expect(row.filter(has_text="seed").get_by_role("cell")).to_have_text(["0", "7"])
    expect(row.filter(has_text="epochs").get_by_role("cell")).to_have_text(["3", "1"])
    expect(row.filter(has_text="subtasks_per_epoch")).to_have_count(0)
    last = done.evaluations[-1].metrics["accuracy"]
    expect(row.filter(has_text="Last accuracy").get_by_role("cell").first).to_have_text(
        f"{last:.1%}"
    )
    for theme, width in VIEWS[:2]:
        page.set_viewport_size({"width": width, "height": 900})
        _choose(page, theme)
        assert dashboard.serious_findings() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_wrong_token_is_refused(signed_out: Dashboard) -> None:
    signed_out.open("/fleet")
    signed_out.page.get_by_label("Token", exact=True).fill("not-the-token")
    signed_out.page.get_by_role("button", name="Sign in").click()
    expect(signed_out.page.get_by_text("the token is wrong (vcasgd up prints")).to_be_visible()


def test_pages_offer_what_the_token_allows(signed_out: Dashboard, job: str) -> None:
    page, client = signed_out.page, signed_out.site.client

    signed_out.sign_in(client.create_token("reader", Scope.READ).token)

    submit = page.get_by_role("button", name="Submit a job")
    expect(submit).to_have_attribute("aria-disabled", "true")
    submit.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("scope submit; reader has scope read")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=job.replace("-", " ")))
    expect(row.get_by_role("cell", name="bootstrap")).to_be_visible()
    signed_out.open(f"/jobs/{job}")
    expect(page.get_by_text("by bootstrap")).to_be_visible()
    expect(page.locator("li[data-machine]").first).to_be_visible()
    expect(page.get_by_role("button", name="Evict")).to_have_count(0)


def test_sign_out_ends_the_session(dashboard: Dashboard) -> None:
    page = dashboard.page
    assert dashboard.site.token not in page.evaluate(
        "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, location.href])"
    )

    page.get_by_role("button", name="Sign out").click()

    expect(page.get_by_role("heading", name="Sign in to vcasgd")).to_be_visible()
    dashboard.open("/fleet")
    expect(page.get_by_role("heading", name="Sign in to vcasgd")).to_be_visible()
    assert page.context.cookies() == []


@pytest.mark.parametrize("views", [1, pytest.param(len(VIEWS), marks=pytest.mark.extended)])
@pytest.mark.ci
def test_pages_are_accessible(dashboard: Dashboard, job: str, views: int) -> None:
    """Check themes and widths of each page, loaded once: with one view of each, the next one."""
    page = dashboard.page
    findings: dict[str, list[str]] = {}
    tabs = [
        f"/jobs/{job}?tab={tab}" for tab in ("workers", "events", "logs", "checkpoints", "yaml")
    ]
    paths = ("/", "/submit", f"/jobs/{job}", *tabs, "/fleet", "/store", "/no-such-page")
    for number, path in enumerate(paths):
        dashboard.open(path)
        live = page.get_by_text("Live", exact=True)
        expect(page.get_by_role("status").and_(live)).to_be_visible()
        expect(page.locator("main h1")).to_be_visible()
        page.wait_for_load_state("load")
        for theme, width in itertools.islice(itertools.cycle(VIEWS), number, number + views):
            page.set_viewport_size({"width": width, "height": 900})
            _choose(page, theme)
            findings[f"{path} {theme} {width}"] = dashboard.serious_findings()
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{path} is {wide} pixels wide"
    assert {path: each for path, each in findings.items() if each} == {}


def test_sign_in_page_is_accessible(signed_out: Dashboard) -> None:
    page = signed_out.page
    signed_out.open("/")
    for theme, width in VIEWS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme)
        expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", theme)
        assert signed_out.serious_findings() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_broken_connection_is_shown_and_recovers(dashboard: Dashboard, page_log: PageLog) -> None:
    state = dashboard.page.get_by_role("status")
    expect(state).to_have_text("Live")
    # Record states, because the connection can recover quickly.
    dashboard.page.evaluate(REMEMBER)

    kill_part(dashboard.site.home, "api")

    dashboard.page.wait_for_function("states.includes('Offline')")
    expect(state).to_have_text("Live")
    # And updates arrive again
    job = _submit_when_ready(dashboard.site)
    expect(dashboard.page.get_by_role("link", name=job.replace("-", " "))).to_be_visible()
    # The browser reports the broken connection; that is not an error of the page.
    assert all("Failed to load" in each or "net::" in each for each in page_log.complaints)
    page_log.complaints.clear()


def test_first_page_is_small(signed_out: Dashboard) -> None:
    finished: list[Request] = []
    signed_out.page.on("requestfinished", lambda request: finished.append(request))

    signed_out.sign_in()

    sizes = [each.sizes()["responseBodySize"] for each in finished if each.url.endswith(".js")]
    assert sum(sizes) > 100_000, "sizes were measured"
    assert sum(sizes) <= SCRIPT_BYTES


def _choose(page: Page, theme: str) -> None:
    switch = page.get_by_role("button", name=f"{theme.capitalize()} theme")
    if switch.count():
        switch.click()
    expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", theme)


def _submit_when_ready(site: Site) -> str:
    with Client(site.url, site.token) as client:
        await_truth(lambda: client.status().controller)
    return site.submit(epochs=1)
