"""Measure the dashboard with a long history and many machines: speed, frames and memory.

    python benchmarks/dashboard.py [--points 100000] [--workers 200] [--seconds 30]
                                   [--soak-seconds 120]

Starts a ledger and an API, generates the history of a job, and opens it in Debian's Chromium.
Writes ``benchmarks/results/dashboard.md``. Stop other programs before you run it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import CDPSession, Page, sync_playwright

import machine
from markdown import table
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.events import NewLine
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases
from vcasgd.store.ledger.servers import Accounts

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
OUT = Path(__file__).resolve().parent / "results" / "dashboard.md"
EPOCHS, SUBTASKS, SAMPLES = 1000, 200, 100_000
#: Seconds for one answer or one page; a busy machine shows in the figures.
PATIENCE_SECONDS = 600.0
#: Entries per second in the soak test; a busy job has a few per minute.
SOAK_RATE = 50
#: Query of the dashboard, see dashboard/src/api/jobs.ts.
CURVES = "points=500&names=loss,updates_per_second,staleness_mean,samples,spent_usd"
FRAMES = """() => {
  window.frames_ms = []; let last = performance.now();
  const each = (now) => { window.frames_ms.push(now - last); last = now;
                          requestAnimationFrame(each); };
  requestAnimationFrame(each);
}"""
LONG_TASKS = """window.long_tasks = [];
new PerformanceObserver((list) => window.long_tasks.push(...list.getEntries().map(
  (each) => [each.startTime, each.duration]))).observe({type: "longtask", buffered: true});"""

PAGE = """\
# The dashboard with a long history and many machines

    {command}

{options.points:,} points, {options.workers} workers, and {lost} machines that were lost before.

{machine}

Answers of the API, the median of ten, sent with gzip:

{answers}

The job's overview in Chromium at 1440 × 900. Each second adds a point, progress and two events;
every fifth second adds a machine:

{shown}

The job's events page, with {entries} events and {entries} log lines per second, measured after the
page holds its maximum number of entries. Each row follows a garbage collection:

{growth}
"""


@dataclass(frozen=True)
class Options:
    points: int
    workers: int
    seconds: float
    soak_seconds: float
    out: Path


class JobWriter:
    """Writer for the data of a running job: parameter server, controller, and workers."""

    def __init__(self, ledger: RedisClient, options: Options) -> None:
        self._ledger, self._options = ledger, options
        self._jobs = Jobs(ledger)
        spec = {"name": "long", "task": "train:Long", "epochs": EPOCHS,
                "subtasks_per_epoch": SUBTASKS, "workers": {"max": options.workers}}  # fmt: skip
        self.job = self._jobs.submit(JobSpec.parse(spec), "0" * 64).id
        self._keys = LedgerKeys(self.job)
        self._accounts = Accounts(ledger, self.job)
        self._count = options.points
        self._lost = 0
        self._stop = threading.Event()

    def write_history(self) -> None:
        leases = Leases(self._ledger, self.job, "w", 10.0)
        lease = leases.acquire()
        assert isinstance(lease, Lease)
        facts = {"samples": SAMPLES, "validation_samples": 10, "layout": "[]", "order_digest": "d"}
        assert leases.report_facts(lease, facts)
        start = time.time() - self._options.points
        self._jobs.transition(
            self.job, JobState.RUNNING, [JobState.STARTING], why="started", started_at=start
        )
        for first in range(0, self._options.points, 1000):
            with self._ledger.pipeline() as pipe:
                for number in range(first, min(first + 1000, self._options.points)):
                    point = self._point(number, start + number)
                    pipe.xadd(self._keys.metrics, {"m": json.dumps(point)})
                pipe.execute()
        self._jobs.update_timelines({self.job: dict(self._lanes(start))})
        for number in range(self._options.workers):
            self._beat(number)

    def _point(self, number: int, at: float) -> dict[str, Any]:
        wave = math.sin(number / 700)
        return {
            "at": at, "version": 18 * number, "updates": 18 * number, "samples": 900 * number,
            "finished_epochs": number // 110, "updates_per_second": 18.2 + 3 * wave,
            "samples_per_second": 910.0 + 150 * wave, "loss": 2.3 / (1 + number / 5000),
            "staleness_mean": 3.0 + wave, "staleness_max": 17, "rejected": 2, "waiting": 3,
            "workers": self._options.workers, "spent_usd": number * 0.004,
        }  # fmt: skip

    def _lanes(self, start: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield all machines, and half as many lost ones that they replaced."""
        now, lost = time.time(), self._options.workers // 2
        for number in range(lost):
            died = start + (now - start) * (number + 1) / (lost + 1)
            spans = [_span("booting", start, start + 60), _span("running", start + 60, died - 30),
                     _span("notice", died - 30, died), _span("dead", died, None)]  # fmt: skip
            yield f"old-{number:04}", _lane(spans, replaced_by=f"i-{number:04}", lost=True)
        for number in range(self._options.workers):
            born = start + (now - start) * (number + 1) / (lost + 1) if number < lost else start
            yield (
                f"i-{number:04}",
                _lane([_span("booting", born, born + 60), _span("running", born + 60, None)]),
            )

    def _beat(self, number: int) -> None:
        beat = {"at": time.time(), "machine": f"i-{number:04}", "host": "10.0.0.1", "pid": 100,
                "doing": "training", "steps": 1000, "samples": 64000, "version": 18 * self._count,
                "pushes": 100, "pushed_bytes": 10**8, "fetched_bytes": 3 * 10**8,
                "resident_bytes": 10**9}  # fmt: skip
        self._ledger.hset(self._keys.workers, f"{self.job}.i-{number:04}", json.dumps(beat))

    def write_second(self, entries: int) -> None:
        """Write one second of data: a point, progress, heartbeats, events and log lines.

        Every fifth second, a machine is lost.
        """
        self._count += 1
        self._jobs.add_metrics(self.job, self._point(self._count, time.time()))
        totals = {"updates": 18 * self._count, "samples": 900 * self._count,
                  "applied": 900 * self._count, "staleness_mean": 3.0, "staleness_max": 17,
                  "staleness": {str(each): 100 * each for each in range(18)}}  # fmt: skip
        # Count epochs from the start of the measurement; the ledger would settle all earlier
        # ones in one call.
        epoch = (self._count - self._options.points) // 111
        self._accounts.account(1, 18 * self._count, epoch, json.dumps(totals), [])
        for number in range(0, self._options.workers, 10):
            self._beat(number)
        for number in range(entries):
            self._jobs.event(self.job, "note", f"something happened, number {number}")
        self._jobs.add_logs(
            self.job,
            f"{self.job}.i-0001",
            [NewLine(time.time(), "out", f"line {each}") for each in range(entries)],
        )
        if self._count % 5 == 0:
            self._lose()

    def _lose(self) -> None:
        name, now = f"late-{self._lost:04}", time.time()
        lane = _lane([_span("booting", now - 4, now - 2), _span("running", now - 2, None)])
        gone = [f"late-{self._lost - 50:04}"]
        self._jobs.update_timelines({self.job: {name: lane}}, {self.job: gone})
        self._jobs.event(self.job, "worker-killed", f"{name} was lost without notice")
        self._lost += 1

    @contextmanager
    def writing(self, entries: int) -> Iterator[None]:
        self._stop.clear()
        thread = threading.Thread(target=self._write, args=(entries,))
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _write(self, entries: int) -> None:
        while not self._stop.wait(1.0):
            self.write_second(entries)


def _span(state: str, since: float, until: float | None) -> dict[str, Any]:
    return {"state": state, "from": since, "to": until}


def _lane(spans: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    fields = {"pool": "aws", "zone": "us-east-1a", "machine_type": "c6i.large", "spot": True,
             "price_per_hour": 0.03, "replaced_by": None, "reason": "", "lost": False}  # fmt: skip
    return {**fields, **more, "spans": spans}


def measure_api(http: httpx.Client, job: str, api: psutil.Process) -> dict[str, str]:
    """Measure answers. The first one reads the whole history; later ones only new points."""
    answers = {}
    for name, path in (
        ("curves, first time", f"jobs/{job}/metrics?{CURVES}"),
        ("curves", f"jobs/{job}/metrics?{CURVES}"),
        ("machines", f"jobs/{job}/timelines"),
        ("workers", f"jobs/{job}/workers"),
        ("subtasks", f"jobs/{job}/subtasks"),
        ("job", f"jobs/{job}"),
    ):
        times = []
        repetitions = 1 if name.endswith("time") else 10
        before = sum(api.cpu_times()[:2])
        for _ in range(repetitions):
            started = time.perf_counter()
            answer = http.get(path)
            times.append(1000 * (time.perf_counter() - started))
            answer.raise_for_status()
        busy = 1000 * (sum(api.cpu_times()[:2]) - before) / repetitions
        sent, whole = int(answer.headers["content-length"]), len(answer.content)
        answers[name] = (
            f"{statistics.median(times):.0f} ms, of the processor {busy:.0f} ms; "
            f"{sent / 1000:.1f} kB ({whole / 1000:.1f} kB before compression)"
        )
    return answers


def measure_page(
    page: Page, url: str, job: str, writer: JobWriter, options: Options
) -> dict[str, str]:
    page.add_init_script(LONG_TASKS)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.setTimeDomain", {"timeDomain": "threadTicks"})
    devtools.send("Performance.enable")
    before = _main_thread(devtools)
    page.goto(f"{url}/jobs/{job}", wait_until="commit")
    page.wait_for_function(
        "count => document.querySelectorAll('canvas').length >= 2 &&"
        " document.querySelectorAll('li[data-machine]').length >= count",
        arg=options.workers,
        timeout=1000 * PATIENCE_SECONDS,
        polling=20,
    )
    drawn = page.evaluate("performance.now()")
    tasks = page.evaluate("until => window.long_tasks.filter(([start]) => start < until)", drawn)
    worked = _main_thread(devtools) - before
    page.wait_for_timeout(3000)
    page.evaluate(FRAMES)
    before = _main_thread(devtools)
    with writer.writing(entries=2):
        page.wait_for_timeout(1000 * options.seconds)
    busy = _main_thread(devtools) - before
    frames = sorted(page.evaluate("window.frames_ms"))
    slow = sum(each > 50 for each in frames)
    return {
        "drawn after navigation, empty cache": f"{drawn / 1000:.2f} s, of the processor "
        f"{1000 * worked:.0f} ms in the main thread",
        "tasks of more than 50 ms until then": f"{len(tasks)}, the longest "
        f"{max((each for _, each in tasks), default=0):.0f} ms",
        "frames during updates": f"{len(frames)} in {options.seconds:.0f} s, median "
        f"{statistics.median(frames):.1f} ms, 95 % in {frames[int(0.95 * len(frames))]:.1f} ms, "
        f"99 % within {frames[int(0.99 * len(frames))]:.1f} ms, longest {frames[-1]:.0f} ms; "
        f"{slow} over 50 ms",
        "main thread": f"{1000 * busy / options.seconds:.0f} ms of processor time per second",
    }


def _main_thread(devtools: CDPSession) -> float:
    rows = devtools.send("Performance.getMetrics")["metrics"]
    return float(next(row["value"] for row in rows if row["name"] == "TaskDuration"))


def measure_growth(
    page: Page, writer: JobWriter, options: Options
) -> list[tuple[str, str, str, str]]:
    """Return rows of time, heap after a collection, elements and listeners."""
    devtools = page.context.new_cdp_session(page)
    rows = []
    with writer.writing(SOAK_RATE):
        # Wait until the page holds its maximum number of entries.
        page.wait_for_timeout(1000 * max(60.0, 2000 / SOAK_RATE + 15))
        for part in range(5):
            if part:
                page.wait_for_timeout(1000 * options.soak_seconds / 4)
            rows.append((f"{part * options.soak_seconds / 4:.0f} s", *_memory(devtools)))
    return rows


def _memory(devtools: CDPSession) -> tuple[str, str, str]:
    for _ in range(2):
        devtools.send("HeapProfiler.collectGarbage")
    heap = devtools.send("Runtime.getHeapUsage")["usedSize"]
    counts = devtools.send("Memory.getDOMCounters")
    return f"{heap / 1e6:.1f} MB", str(counts["nodes"]), str(counts["jsEventListeners"])


def sign_in(page: Page, url: str, token: str) -> None:
    page.goto(url)
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Jobs", exact=True).wait_for()


def measure(options: Options) -> str:
    with tempfile.TemporaryDirectory(prefix="vcasgd-dashboard-") as folder:
        settings = Settings(home=Path(folder), api_port=0)
        with running(settings, names=("ledger", "api")) as state:
            home = StackHome(settings.home_path)
            url, token = state.api_url, home.token() or ""
            writer = JobWriter(_ledger(home, state), options)
            writer.write_history()
            with httpx.Client(
                base_url=f"{url}/api/v1/",
                headers={"Authorization": f"Bearer {token}"},
                timeout=PATIENCE_SECONDS,
            ) as http:
                answers = measure_api(http, writer.job, psutil.Process(state.parts["api"].pid))
            memory = _ledger(home, state).memory_usage(LedgerKeys(writer.job).metrics, samples=0)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                page.set_default_timeout(1000 * PATIENCE_SECONDS)
                sign_in(page, url, token)
                page.context.new_cdp_session(page).send("Network.clearBrowserCache")
                shown = measure_page(page, url, writer.job, writer, options)
                # The events page keeps the most entries.
                page.goto(f"{url}/jobs/{writer.job}?tab=events")
                growth = measure_growth(page, writer, options)
                browser.close()
    return written(
        options, answers | {"points in the ledger": f"{memory / 1e6:.0f} MB"}, shown, growth
    )


def _ledger(home: StackHome, state: StackState) -> RedisClient:
    return connect(f"redis://:{home.ensure_password('ledger')}@127.0.0.1:{state.ports['ledger']}/0")


def written(
    options: Options,
    answers: dict[str, str],
    shown: dict[str, str],
    growth: list[tuple[str, str, str, str]],
) -> str:
    command = (
        f"python benchmarks/dashboard.py --points {options.points} --workers {options.workers} "
        f"--seconds {options.seconds:g} --soak-seconds {options.soak_seconds:g}"
    )
    return PAGE.format(
        command=command,
        options=options,
        lost=options.workers // 2,
        entries=SOAK_RATE,
        machine=table(("", ""), machine.describe().items()),
        answers=table(("answer", "time and size"), answers.items()),
        shown=table(("", ""), shown.items()),
        growth=table(("time", "heap", "nodes", "listeners"), growth),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--soak-seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = Options(**vars(parser.parse_args()))
    text = measure(options)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
