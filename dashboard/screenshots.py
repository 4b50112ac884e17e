"""Take screenshots of every page of a real stack, at both widths and in both themes.

Jobs with several learning rates run to their ends before; another one loses a killed and an
evicted machine.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import sub
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from vcasgd.cli.jobfile import load_job
from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, StackState, running

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
EXAMPLE = Path(__file__).parents[1] / "examples" / "digits" / "demo.yaml"
WIDTHS = {1440: 900, 390: 844}
THEMES = ("light", "dark")
#: Reduces the size of the files; pages have few colors.
COLORS = 256
#: Difference of two colors that the files tell apart.
CLOSE = 6
#: Time for charts and updates to arrive.
SETTLE_SECONDS = 2.5
#: Limit for one page on a busy machine.
PATIENCE_MS = 120_000
WORKERS = 4
#: Learning rates of the jobs that are compared.
RATES = (0.003, 0.01, 0.025)
BUDGET_USD = 1.0


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with _stack() as (url, token), Client(url, token) as client:
        finished = [_submit(client, "digits-small", 8, learning_rate=rate) for rate in RATES]
        for each in finished:
            client.job(each).wait(300)
        job = _submit(client, "digits", 150)
        _lose_machines(client, job)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
            _shoot(browser, url, token, job, finished, out)
            browser.close()


@contextmanager
def _stack() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory(prefix="vcasgd-screenshots-") as folder:
        settings = Settings(
            home=Path(folder),
            api_port=0,
            local_capacity=2 * WORKERS,
            # Without a second price: a simulated one must not look like a saving.
            local_price_per_hour=0.31,
        )
        with running(settings):
            home = StackHome(settings.home_path)
            yield StackState.read(home.path).api_url, home.token() or ""


def _submit(client: Client, name: str, epochs: int, **args: float) -> str:
    spec = load_job(EXAMPLE)
    workers = spec.workers.model_copy(update={"max": WORKERS})
    stop = spec.stop.model_copy(update={"max_cost_usd": BUDGET_USD})
    changes = {
        "name": name,
        "epochs": epochs,
        "workers": workers,
        "stop": stop,
        "args": spec.args | args,
    }
    return client.submit_directory(spec.model_copy(update=changes)).id


def _lose_machines(client: Client, job: str) -> None:
    """Kill a machine, evict another, and wait for their replacements."""
    _await(client, job, 0.06)
    first, second, *_ = sorted(row.machine for row in client.job(job).workers())
    client.evict(machine=first, kill=True)
    _await(client, job, 0.12)
    client.evict(machine=second)
    _await(client, job, 0.2)


def _await(client: Client, job: str, fraction: float) -> None:
    deadline = time.monotonic() + 300
    while client.job(job).progress.fraction < fraction:
        if time.monotonic() > deadline:
            raise SystemExit(f"{job} is not at {fraction:.0%} after five minutes")
        time.sleep(0.5)


def _shoot(
    browser: Browser, url: str, token: str, job: str, finished: list[str], out: Path
) -> None:
    pages = {
        "job": f"/jobs/{job}",
        "jobs": "/",
        "compare": f"/compare?jobs={','.join(finished)}",
        "fleet": "/fleet",
        "store": "/store",
    }
    contexts = {
        (width, theme): browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme
        )
        for width, height in WIDTHS.items()
        for theme in THEMES
    }
    signed_in: dict[tuple[int, str], Page] = {}
    for (width, theme), context in contexts.items():
        context.set_default_timeout(PATIENCE_MS)
        page = signed_in[width, theme] = context.new_page()
        page.goto(url)
        page.get_by_label("Token", exact=True).fill(token)
        _save(page, out / f"sign-in-{width}-{theme}.png")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Jobs", exact=True).wait_for()
    tabs = ("workers", "checkpoints")
    pages |= {tab: f"/jobs/{job}?tab={tab}" for tab in tabs}
    # All variants of a page follow each other, while the job is still running.
    for name, path in {**pages, "submit": "/submit"}.items():
        for (width, theme), page in signed_in.items():
            page.goto(url + path)
            page.locator("main h1").wait_for()
            page.get_by_role("status").get_by_text("Live").wait_for()
            if name == "submit":
                _plan(page)
            page.wait_for_timeout(SETTLE_SECONDS * 1000)
            expect(page.get_by_text("Loading…")).to_have_count(0, timeout=PATIENCE_MS)
            _save(page, out / f"{name}-{width}-{theme}.png")


def _plan(page: Page) -> None:
    page.get_by_label("job.yaml", exact=True).last.fill(EXAMPLE.read_text())
    page.get_by_text("valid", exact=True).wait_for()
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_text("Per hour", exact=True).wait_for()


def _save(page: Page, path: Path) -> None:
    # A page that is scrolled has its header over the content in a picture of the full page.
    page.evaluate("window.scrollTo(0, 0)")
    shot = page.screenshot(full_page=True, timeout=PATIENCE_MS)
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    picture.quantize(palette=_palette(picture), dither=Image.Dither.NONE).save(path, optimize=True)


def _palette(picture: Image.Image) -> Image.Image:
    """Return the most frequent colors, so that areas keep theirs, and colors between all others.

    Pillow tells colors apart by six bits of each value, so that one of two that are close would
    replace the other.
    """
    found = picture.getcolors(picture.width * picture.height) or []
    values = picture.quantize(COLORS // 2, Image.Quantize.MAXCOVERAGE).getpalette() or []
    others = zip(values[::3], values[1::3], values[2::3], strict=True)
    # A small dot has a meaning that hundreds of grays at the edges of letters don't have.
    weighted = sorted(found, key=lambda each: -each[0] * (1 + max(each[1]) - min(each[1])))
    # In this order, areas keep their colors.
    frequent = (color for _, color in sorted(weighted[: COLORS // 2], reverse=True))
    distinct: list[tuple[int, ...]] = []
    for color in (*frequent, *others):
        if all(max(map(abs, map(sub, color, each))) >= CLOSE for each in distinct):
            distinct.append(color)
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for color in distinct for value in color])
    return palette


if __name__ == "__main__":
    main()
