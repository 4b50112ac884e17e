"""``vcasgd demo``: a stack, a job, two lost machines and a trained model in two minutes."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import vcasgd
from vcasgd.agent.agent import LeaveSignals
from vcasgd.cli.follow import JobStatus, follow, statuses
from vcasgd.cli.jobfile import load_job
from vcasgd.cli.output import Json, err, out, percent, show_json
from vcasgd.cli.stack import ReadyPrinter, StoreNodes
from vcasgd.client import Client
from vcasgd.errors import ApiError, StackError
from vcasgd.schemas.fleet import WorkerRow
from vcasgd.schemas.jobs import JobView
from vcasgd.settings import separate_settings
from vcasgd.stack import ForegroundStack, StackHome, StackState

#: Accuracy that the demo guarantees.
MIN_ACCURACY = 0.96
#: Seconds until the demo gives up on its job; far more than a slow machine needs.
LIMIT_SECONDS = 600.0
#: Machines of the demo; the first fault waits until all of them train.
WORKERS = 3
#: Fractions of the job after which a fault no longer waits for all machines.
LATEST_EVICTION = 0.35
LATEST_KILL = 0.6
#: Longest wait for a signal at a time.
KEEP_SECONDS = 3600.0


@dataclass(frozen=True)
class Summary:
    """Result of the demo; ``--json`` prints its fields."""

    accuracy: float
    seconds: float
    updates_applied: int
    staleness_mean: float
    staleness_max: int
    evictions: int
    kills: int
    samples_lost: int | None
    samples_repeated: int
    model_path: str

    @classmethod
    def of(cls, job: JobView, seconds: float, model: Path) -> Summary:
        return cls(
            accuracy=job.best.value if job.best else 0.0,
            seconds=round(seconds, 1),
            updates_applied=job.totals.updates,
            staleness_mean=job.totals.staleness_mean,
            staleness_max=job.totals.staleness_max,
            evictions=job.evictions,
            kills=job.kills,
            samples_lost=job.progress.samples_lost,
            samples_repeated=job.progress.samples_repeated,
            model_path=str(model),
        )

    def lines(self) -> list[str]:
        """Return the summary as text."""
        return [
            f"accuracy           {percent(self.accuracy)} of the best model on the validation data",
            f"time               {self.seconds:.0f} s, without the installation",
            f"updates            {self.updates_applied}",
            f"staleness          mean {self.staleness_mean:.2f}, maximum {self.staleness_max}",
            f"machines lost      {self.evictions} with notice, {self.kills} without",
            f"samples lost       {self.samples_lost}",
            f"samples repeated   {self.samples_repeated}",
            f"model              {self.model_path}",
        ]

    def failures(self) -> list[str]:
        """Return a message for each guarantee that the demo did not keep."""
        checks = {
            f"the accuracy is below {MIN_ACCURACY:.0%}": self.accuracy < MIN_ACCURACY,
            f"{self.samples_lost} samples were lost": self.samples_lost != 0,
            f"{self.samples_repeated} samples were repeated": self.samples_repeated != 0,
            "no machine was evicted with notice": self.evictions < 1,
            "no machine was killed without notice": self.kills < 1,
        }
        return [text for text, failed in checks.items() if failed]


@dataclass
class Faults:
    """Fault injector: evicts a machine with notice and, once it is replaced, kills another.

    Called with each status of the job.
    """

    client: Client
    evicted: str | None = None
    killed: str | None = None

    def __call__(self, status: JobStatus) -> None:
        training = [
            row for row in status.workers if row.steps and not row.notice and not row.leaving
        ]
        complete, done = len(training) >= WORKERS, status.job.progress.fraction
        if self.evicted is None:
            if training and (complete or done >= LATEST_EVICTION):
                self.evicted = self._evict(training[0], kill=False)
        elif self.killed is None and status.job.evictions:
            others = [row for row in training if row.machine != self.evicted]
            if others and (complete or done >= LATEST_KILL):
                self.killed = self._evict(others[0], kill=True)

    def _evict(self, worker: WorkerRow, *, kill: bool) -> str | None:
        """Return the evicted machine, or None if the worker had already left."""
        try:
            return self.client.evict(worker.name, kill=kill).machine
        except ApiError:
            return None


class Interrupted(Exception):
    """A signal asked the demo to end."""


def demo(
    model: Annotated[Path, typer.Option(help="Output file for the trained model.")] = Path(
        "vcasgd-demo-model.safetensors"
    ),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the stack running until Ctrl-C.")
    ] = False,
    store_nodes: StoreNodes = None,
    as_json: Json = False,
) -> None:
    """Train on three local machines, and lose two of them on the way.

    Exits with status 0 only if the model is accurate and no sample was lost or repeated. Leaves
    nothing behind except the model.
    """
    model = model.absolute()
    # An error here comes before minutes of training.
    model.parent.mkdir(parents=True, exist_ok=True)
    # A signal is only noted, so setup and cleanup always run to completion.
    signals = LeaveSignals()
    run = _Demo(err if as_json else out, signals, store_nodes or 1)
    try:
        with signals.caught():
            run.run(model, keep=keep, as_json=as_json)
    except Interrupted:
        err.print("interrupted; everything is stopped")
        # As a shell reports a process that a signal killed.
        raise typer.Exit(128 + signals.number) from None


class _Demo:
    """One run of the demo."""

    def __init__(self, console: Console, signals: LeaveSignals, store_nodes: int) -> None:
        self._console = console
        self._store_nodes = store_nodes
        self._signals = signals
        self._started = time.monotonic()

    def run(self, model: Path, *, keep: bool, as_json: bool) -> None:
        with ExitStack() as resources:
            home = Path(tempfile.mkdtemp(prefix="vcasgd-demo-"))
            resources.callback(shutil.rmtree, home, ignore_errors=True)
            stack = ForegroundStack(
                separate_settings(home=home, local_capacity=WORKERS, store_nodes=self._store_nodes)
            )
            resources.callback(stack.stop)
            url, summary = self._train(home, stack, model)
            self._report(summary, url, keep=keep, as_json=as_json)
            if keep:
                self._wait_for_signal(home)
        _check(summary)

    def _train(self, home: Path, stack: ForegroundStack, model: Path) -> tuple[str, Summary]:
        self._print("starting a stack on this machine")
        printer = ReadyPrinter(self._console)

        def progress(state: StackState) -> None:
            self._check_signals()
            printer(state)

        url = stack.await_ready(progress).api_url
        with Client(url, StackHome(home).token() or "") as client:
            spec = load_job(_example() / "demo.yaml")
            job = client.submit_directory(spec)
            self._print(f"submitted {job.id} to {url}")
            bounded = self._bounded(statuses(client, job.id))
            view = follow(bounded, self._console, Faults(client))
            if view.state != "succeeded":
                raise StackError(
                    f"the demo's job {view.state}: {view.reason}", traceback=view.traceback
                )
            client.job(view.id).download(model)
        return url, Summary.of(view, time.monotonic() - self._started, model)

    def _report(self, summary: Summary, url: str, *, keep: bool, as_json: bool) -> None:
        self._print("")
        for line in summary.lines():
            self._print(line)
        note = "" if keep else " (stopped now; use --keep to keep it running)"
        self._print(f"API, dashboard     {url}{note}")
        if as_json:
            show_json(asdict(summary))

    def _wait_for_signal(self, home: Path) -> None:
        """Wait for SIGINT or SIGTERM, either of which is a normal end here."""
        self._print(f"the stack runs until Ctrl-C; use it with: VCASGD_HOME={home} vcasgd")
        while not self._signals.wait(KEEP_SECONDS):
            pass
        self._print("stopping")

    def _check_signals(self) -> None:
        if self._signals.count:
            raise Interrupted

    def _bounded(self, found: Iterator[JobStatus]) -> Iterator[JobStatus]:
        deadline = time.monotonic() + LIMIT_SECONDS
        for status in found:
            self._check_signals()
            if time.monotonic() > deadline and not status.job.over:
                raise StackError(
                    f"the demo's job did not end within {LIMIT_SECONDS:.0f} s: {status}",
                    remedy="try again while this machine is less busy",
                )
            yield status

    def _print(self, text: str) -> None:
        self._console.print(text)


def _check(summary: Summary) -> None:
    failures = summary.failures()
    for failure in failures:
        err.print(f"error: {failure}")
    if failures:
        raise typer.Exit(1)


def _example() -> Path:
    """Return the folder of the digits example, in a source tree or an installed package.

    Raises :class:`StackError` if there is none, or if scikit-learn is missing.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise StackError(
            "the demo requires scikit-learn for its data, and it is not installed",
            remedy="pip install 'vcasgd[stack,examples]'",
        )
    package = Path(vcasgd.__file__).parent
    for examples in (package.parent / "examples", package / "_examples"):
        if (examples / "digits" / "demo.yaml").is_file():
            return examples / "digits"
    raise StackError(
        "this installation has no examples", remedy="pip install --force-reinstall vcasgd"
    )
