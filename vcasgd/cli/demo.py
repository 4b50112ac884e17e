"""The whole product in about a minute: a stack, a job, two machines lost, a model."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import vcasgd
from vcasgd.cli.faults import WORKERS, Faults
from vcasgd.cli.interrupts import CommandInterrupted, Interrupts
from vcasgd.cli.jobfile import load_job
from vcasgd.cli.output import Json, err, out, percent, show_json
from vcasgd.cli.progress import follow, summary_line
from vcasgd.cli.stack import Narrator, StoreNodes
from vcasgd.cli.watch import JobStatus, Watch, accuracy
from vcasgd.client import Client, JobView
from vcasgd.errors import StackError
from vcasgd.settings import Settings, load_settings
from vcasgd.stack import ForegroundStack, StackHome

#: what the demo promises
LEAST_ACCURACY = 0.96
#: a job that is not over by then never will be
LIMIT_SECONDS = 600.0
#: settings of the user that the demo keeps; it touches nothing else of theirs
KEPT = ("redis_server", "log_level")


@dataclass(frozen=True)
class Summary:
    """What ``--json`` prints."""

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
            accuracy=accuracy(job) or 0.0,
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
        """For people."""
        return [
            f"accuracy           {percent(self.accuracy)} on the validation data",
            f"time               {self.seconds:.0f} s, from an empty folder to the model",
            f"updates            {self.updates_applied}",
            f"staleness          mean {self.staleness_mean:.2f}, maximum {self.staleness_max}",
            f"machines lost      {self.evictions} with notice, {self.kills} without",
            f"samples lost       {self.samples_lost}",
            f"samples repeated   {self.samples_repeated}",
            f"model              {self.model_path}",
        ]

    def complaints(self) -> list[str]:
        """What is not as promised."""
        found = {
            f"the accuracy is below {LEAST_ACCURACY:.0%}": self.accuracy < LEAST_ACCURACY,
            f"{self.samples_lost} samples were lost": self.samples_lost != 0,
            f"{self.samples_repeated} samples were repeated": self.samples_repeated != 0,
            "no machine was evicted with notice": self.evictions < 1,
            "no machine was killed without notice": self.kills < 1,
        }
        return [text for text, wrong in found.items() if wrong]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Stack")(demo)


def demo(
    model: Annotated[Path, typer.Option(help="Where the trained model goes.")] = Path(
        "vcasgd-demo-model.safetensors"
    ),
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the stack up at the end, until Ctrl-C.")
    ] = False,
    store_nodes: StoreNodes = None,
    as_json: Json = False,
) -> None:
    """Train on three machines of this computer, two of which are taken away on the way.

    Exit status 0 only if the model is good and no sample was lost or repeated. Nothing is
    left behind but the model.
    """
    interrupts = Interrupts()
    run = _Demo(err if as_json else out, interrupts, store_nodes or 1)
    try:
        with interrupts.installed():
            run.run(model.absolute(), keep=keep, as_json=as_json)
    except CommandInterrupted as interrupted:
        err.print("interrupted; everything is stopped", markup=False)
        raise typer.Exit(interrupted.exit_status) from None


class _Demo:
    def __init__(self, console: Console, interrupts: Interrupts, store_nodes: int) -> None:
        self._console = console
        self._store_nodes = store_nodes
        self._interrupts = interrupts
        self._started = time.monotonic()

    def run(self, model: Path, *, keep: bool, as_json: bool) -> None:
        with ExitStack() as resources:
            home = Path(tempfile.mkdtemp(prefix="vcasgd-demo-"))
            resources.callback(shutil.rmtree, home, ignore_errors=True)
            stack = ForegroundStack(_settings(home, self._store_nodes))
            resources.callback(stack.stop)
            with self._interrupts.allowed():
                url, summary = self._work(home, stack, model)
            self._report(summary, url, keep=keep, as_json=as_json)
            if keep:
                self._stay(home)
        _judge(summary)

    def _work(self, home: Path, stack: ForegroundStack, model: Path) -> tuple[str, Summary]:
        self._say("starting a stack on this machine")
        url = stack.await_ready(Narrator(self._console)).api_url
        with Client(url, StackHome(home).token() or "") as client:
            spec = load_job(_example() / "demo.yaml")
            job = client.submit_directory(spec, idempotency_key=uuid.uuid4().hex)
            self._say(f"submitted {job.id} to {url}")
            looks = _bounded(Watch(client, job.id).looks())
            view = follow(looks, self._console, Faults(client))
            if view.state != "succeeded":
                raise StackError(
                    f"the demo's job {view.state}: {view.reason}", traceback=view.traceback
                )
            client.download(view.id, model)
        return url, Summary.of(view, time.monotonic() - self._started, model)

    def _report(self, summary: Summary, url: str, *, keep: bool, as_json: bool) -> None:
        self._say("")
        for line in summary.lines():
            self._say(line)
        note = "" if keep else " (while it ran; --keep leaves it up)"
        self._say(f"API, dashboard     {url}{note}")
        if as_json:
            show_json(asdict(summary))

    def _stay(self, home: Path) -> None:
        """Until a signal comes, which is no failure here."""
        self._say(f"the stack stays up until Ctrl-C; look at it with: VCASGD_HOME={home} vcasgd")
        try:
            with self._interrupts.allowed():
                signal.pause()
        except CommandInterrupted:
            self._say("stopping")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def _bounded(looks: Iterator[JobStatus]) -> Iterator[JobStatus]:
    deadline = time.monotonic() + LIMIT_SECONDS
    for look in looks:
        if time.monotonic() > deadline and not look.job.over:
            raise StackError(
                f"the demo's job is not over after {LIMIT_SECONDS:.0f} s: {summary_line(look)}",
                remedy="try again while this machine is less busy",
            )
        yield look


def _judge(summary: Summary) -> None:
    complaints = summary.complaints()
    for complaint in complaints:
        err.print(f"error: {complaint}", markup=False)
    if complaints:
        raise typer.Exit(1)


def _settings(home: Path, store_nodes: int) -> Settings:
    """Of a stack that has nothing in common with the user's own."""
    settings = load_settings()
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in Settings.model_fields.items()
        if name not in KEPT
    }
    own = {
        "home": home,
        "api_port": 0,
        "local_capacity": WORKERS,
        "store_nodes": store_nodes,
    }
    return settings.model_copy(update=defaults | own)


def _example() -> Path:
    """Of a source tree, else of an installed package. Raises :class:`StackError`."""
    if importlib.util.find_spec("sklearn") is None:
        raise StackError(
            "the demo's data comes with scikit-learn, which is not installed",
            remedy="pip install 'vcasgd[examples]'",
        )
    package = Path(vcasgd.__file__).parent
    for examples in (package.parent / "examples", package / "_examples"):
        if (examples / "digits" / "demo.yaml").is_file():
            return examples / "digits"
    raise StackError(
        "this installation has no examples", remedy="pip install --force-reinstall vcasgd"
    )
