"""The public page for volunteers in a real Chromium, without a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from support.pages import PageLog, serious_findings
from support.volunteers import public_api, work_of_volunteers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_visitors_see_what_is_trained_and_by_whom(
    browser: Browser, tmp_path: Path, theme: str, width: int
) -> None:
    log = PageLog()
    with (
        public_api(tmp_path) as api,
        browser.new_context(
            viewport={"width": width, "height": 844}, color_scheme=theme
        ) as context,
    ):
        # Given a public job that volunteers have worked for
        job = api.submit(public={"title": "Digits for everyone", "description": "It reads digits."})
        work_of_volunteers(api, job)
        page = context.new_page()
        log.follow(page)

        # When somebody without a token opens the page
        page.goto(f"{api.url}/volunteers")

        # Then it shows the job and the nicknames, and fits the window
        expect(page.get_by_role("heading", name="Digits for everyone")).to_be_visible()
        rows = page.get_by_role("table").get_by_role("row")
        expect(rows).to_contain_text(["Volunteer", "Night Owl", "Bob", "anonymous"])
        expect(page.get_by_role("progressbar", name="Progress")).to_have_attribute(
            "aria-valuenow", "50"
        )
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert serious_findings(page) == []

        # and updates itself
        api.account(job, 9, 1, applied=150, samples=150)
        expect(page.get_by_text("75.0%")).to_be_visible(timeout=60_000)
    assert log.complaints == []
    assert log.hosts == {f"127.0.0.1:{api.port}"}
