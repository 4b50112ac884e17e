"""Fixtures with a real stack and a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from support.missing import skip_here
from support.pages import Dashboard, PageLog, Site

from vcasgd.settings import Settings
from vcasgd.stack import running

#: Debian's browser; tests download none.
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
WORKERS = 2
#: Milliseconds that a page can take on a busy machine.
PATIENCE_MS = 240_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Browser for one module; while it runs, other tests can't run an event loop."""
    program = shutil.which("chromium") or CHROMIUM
    if not Path(program).exists():
        skip_here(f"there is no {CHROMIUM}; apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Stack for all tests of this folder, with simulated prices."""
    settings = Settings(
        home=tmp_path_factory.mktemp("browser") / "home",
        api_port=0,
        local_capacity=WORKERS,
        idle_seconds=120.0,
        local_price_per_hour=0.3,
        local_on_demand_price_per_hour=1.0,
    )
    with running(settings):
        site = Site(settings)
        yield site
        site.close()


@pytest.fixture
def page_log() -> PageLog:
    """Messages of the browser. A test that expects messages clears them."""
    return PageLog()


@pytest.fixture
def signed_out(
    browser: Browser, site: Site, page_log: PageLog, request: pytest.FixtureRequest
) -> Iterator[Dashboard]:
    """Page of a signed-out user. If its test fails, what the page shows is printed."""
    failed = request.session.testsfailed
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page = context.new_page()
    page_log.follow(page)
    yield Dashboard(page, site)
    if request.session.testsfailed > failed:
        text = page.locator("body").aria_snapshot()
        request.node.add_report_section("teardown", "page", text)
    context.close()
    assert page_log.complaints == []
    assert page_log.hosts <= {site.host}, "no other host is ever contacted"


@pytest.fixture
def dashboard(signed_out: Dashboard) -> Dashboard:
    signed_out.sign_in()
    return signed_out
