"""Page objects of the dashboard, which use its visible names."""

from __future__ import annotations

import json
import re
import shutil
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import yaml
from playwright.sync_api import ConsoleMessage, Locator, Page, expect

from vcasgd.cli.jobfile import load_job
from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, StackState
from vcasgd.task.package import pack

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "digits"
AXE = ROOT / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
#: Expected message of the browser while the user is signed out.
_NOT_SIGNED_IN = re.compile(r"status of 401")
#: Impacts of accessibility findings that fail a test.
SERIOUS = ("serious", "critical")


class Site:
    def __init__(self, settings: Settings) -> None:
        self.home = StackHome(settings.home_path)

    @cached_property
    def url(self) -> str:
        return StackState.read(self.home.path).api_url

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    @cached_property
    def token(self) -> str:
        return self.home.token()

    @cached_property
    def client(self) -> Client:
        return Client(self.url, self.token)

    def close(self) -> None:
        self.client.close()

    def submit(self, **fields: Any) -> str:
        """Submit a job that takes a few seconds by default."""
        spec = load_job(EXAMPLE / "demo.yaml")
        return self.client.submit_directory(spec.model_copy(update={"epochs": 3, **fields})).id


class PageLog:
    """Console messages of a page and the hosts that it contacts."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str] = set()

    def follow(self, page: Page) -> None:
        page.on("console", self._on_message)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._on_request(request.url))

    def _on_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not _NOT_SIGNED_IN.search(message.text):
            self.complaints.append(f"{message.type}: {message.text}")

    def _on_request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob"):
            self.hosts.add(parts.netloc)


class Dashboard:
    def __init__(self, page: Page, site: Site) -> None:
        self.page = page
        self.site = site

    def open(self, path: str) -> None:
        self.page.goto(self.site.url + path)

    def sign_in(self, token: str | None = None) -> None:
        self.open("/")
        self.page.get_by_label("Token", exact=True).fill(token or self.site.token)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()

    def submit(self, text: str, code: Path) -> str:
        """Submit a job with the form: YAML, code, plan. Returns the job's ID."""
        page = self.page
        page.get_by_role("link", name="Submit a job").click()
        page.get_by_role("textbox", name="job.yaml", exact=True).fill(text)
        expect(page.get_by_text("valid", exact=True)).to_be_visible()
        page.locator("input[type=file][accept*=zip]").set_input_files(code)
        page.get_by_role("button", name="Show the plan").click()
        expect(page.get_by_text("Per hour", exact=True)).to_be_visible()
        page.get_by_role("button", name="Submit the job").click()
        page.wait_for_url("**/jobs/*")
        return page.url.rpartition("/")[2]

    def figure(self, name: str) -> Locator:
        return self.page.locator("dl > div", has_text=name).locator("dd").first

    def fraction(self) -> float:
        return float(self.figure("Progress").inner_text().rstrip("%"))

    def machines(self, state: str) -> list[str]:
        """Return the names of the machines whose lanes show a state."""
        lanes = self.page.locator(f"li[data-machine][data-state={state}]")
        return [str(lane.get_attribute("data-machine")) for lane in lanes.all()]

    def timeline_span(self, machine: str, state: str) -> Locator:
        return self.page.locator(f"g[data-lane={machine}] rect[data-state={state}]")

    def serious_findings(self) -> list[str]:
        return serious_findings(self.page)


def serious_findings(page: Page) -> list[str]:
    """Return serious findings of axe-core with their elements."""
    # A fading tooltip fails the contrast check.
    page.mouse.move(0, 0)
    expect(page.get_by_role("tooltip")).to_have_count(0)
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    results = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {json.dumps([node['html'][:200] for node in each['nodes']][:3])}"
        for each in results["violations"]
        if each["impact"] in SERIOUS
    ]


#: Task that runs slowly while a file exists.
HELD = """
from pathlib import Path
from paced import PacedDigits

class HeldDigits(PacedDigits):
    def __init__(self, hold, **args):
        super().__init__(**args)
        self.hold = Path(hold)

    def loss(self, model, batch):
        if not self.hold.exists():
            self.image_seconds = 0.0
        return super().loss(model, batch)
"""


def held_example(folder: Path) -> tuple[str, Path, Path]:
    """Return the YAML, the zipped code, and the file that keeps the job slow."""
    hold, code = folder / "hold", folder / "digits.zip"
    hold.touch()
    with TemporaryDirectory() as copy:
        shutil.copytree(EXAMPLE, copy, dirs_exist_ok=True)
        (Path(copy) / "held.py").write_text(HELD)
        code.write_bytes(pack(Path(copy), 10**8))
    args = {"image_seconds": 0.03, "hold": str(hold)}
    spec = yaml.safe_load((EXAMPLE / "demo.yaml").read_text())
    spec |= {"task": "held:HeldDigits", "args": args, "epochs": 10}
    return yaml.safe_dump(spec), code, hold
