"""Job on a stack of its own that counts how often each sample is applied.

If it fails, the evidence is the state of the stack, and the ends of all logs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from vcasgd.client import Client
from vcasgd.errors import StackError, VcasgdError
from vcasgd.fleet.pools import LocalPoolSpec
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.logging import last_lines
from vcasgd.settings import Settings, separate_settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState
from vcasgd.stack.layout import part_names, service_urls
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.untrusted import Heartbeat

#: Seconds for the job after the last fault.
FINISH_SECONDS = 600.0
STEP_SECONDS = 0.1
BATCH_SIZE = 5
SUBTASKS_PER_EPOCH = 20
SAMPLES = 2000
WORKERS = 3
#: Lines per log; shows the last actions of a part and fits into the report of a test.
LOG_LINES = 12
LINE_LENGTH = 240
EVENTS = 15
#: Number of machines and of workers with logs in the evidence.
NEWEST = 4
#: Maximum size of a copied log file of Ray.
LARGEST_BYTES = 1_000_000

#: Title of a source → its lines.
Evidence = dict[str, list[str]]


@dataclass
class CountReport:
    """Counts of the samples that were applied, and the reason of a failure."""

    seconds: float = 0.0
    samples_expected: int = 0
    samples_applied: int = 0
    samples_skipped: int = 0
    samples_lost: int = 0
    samples_repeated: int = 0
    updates_applied: int = 0
    updates_rejected: int = 0
    failure: str | None = None
    #: Folder and evidence of a failed run.
    folder: str | None = None
    evidence: Evidence = field(default_factory=dict)

    def count(self, counts: Tensor, epochs: int, skipped: int = 0) -> None:
        """Count samples in the final vector; each coordinate should be the number of epochs.

        ``skipped`` is the number that the job reports: applied and skipped are those expected.
        """
        self.samples_expected = counts.numel() * epochs
        missing = int((epochs - counts).clamp(min=0).sum())
        self.samples_repeated = int((counts - epochs).clamp(min=0).sum())
        self.samples_applied = self.samples_expected - missing
        self.samples_skipped, self.samples_lost = skipped, missing - skipped

    @property
    def passed(self) -> bool:
        """True if no sample was lost or repeated, and every fault fired."""
        return self.failure is None and not self.samples_lost and not self.samples_repeated

    def describe_counts(self) -> Iterator[str]:
        """Yield the counts, and why the run failed, as lines of text."""
        yield (
            f"samples: {self.samples_expected} expected, {self.samples_applied} applied, "
            f"{self.samples_skipped} skipped, {self.samples_lost} lost, "
            f"{self.samples_repeated} repeated"
        )
        yield f"updates: {self.updates_applied} applied, {self.updates_rejected} rejected"
        if self.failure:
            yield f"failed: {self.failure}"
        yield from as_lines(self.evidence)
        if self.folder:
            yield f"logs and data are in {self.folder}"
        yield f"{'passed' if self.passed else 'FAILED'} in {self.seconds} s"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {**vars(self), "passed": self.passed}


@contextlib.contextmanager
def report_folder(report: CountReport) -> Iterator[Path]:
    """Create a folder for a run, measure it, and remove the folder unless the report names it."""
    folder, started = Path(tempfile.mkdtemp(prefix="vcasgd-audit-")), time.monotonic()
    try:
        yield folder
    finally:
        report.seconds = round(time.monotonic() - started, 1)
        if report.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def own_settings(home: Path, **fields: Any) -> Settings:
    """Return the settings of a stack that shares nothing with others."""
    return separate_settings(home=home, local_capacity=WORKERS, **fields)


def epochs_for(seconds: float) -> int:
    """Return the epochs that all workers together train for about so long."""
    seconds_per_epoch = SAMPLES / BATCH_SIZE * STEP_SECONDS / WORKERS
    return max(2, round(seconds / seconds_per_epoch))


def counting_spec(
    epochs: int, hold: Path | None = None, copies: int = 1, *, bad: bool = False
) -> JobSpec:
    """Return a job in which every sample has weight 1; with ``bad``, it skips some.

    With ``hold``, the job ends soon after that file is removed. Each of ``copies`` store nodes
    counts all samples.
    """
    return JobSpec.parse(
        {
            "name": "audit",
            "task": "audit:Audit",
            "working_dir": str(Path(__file__).parent / "task"),
            "args": {
                "samples": SAMPLES,
                "batch_size": BATCH_SIZE,
                "step_seconds": STEP_SECONDS,
                "hold": str(hold) if hold else None,
                "copies": copies,
                "bad": bad,
            },
            "on_bad_sample": "skip" if bad else "fail",
            "max_bad_samples": 0.05,
            "epochs": epochs,
            "subtasks_per_epoch": SUBTASKS_PER_EPOCH,
            "push_every": 4,
            "update": {"rule": "async-local-sgd", "eta": 1.0},
            "workers": {"min": 1, "max": WORKERS},
            "checkpoint": {"every": "5s", "keep": 3},
        }
    )


class AuditedJob:
    """The job, which trains until :meth:`finish`, with connections to the parts of its stack.

    Raises :class:`~vcasgd.errors.StackError` if the stack has no token.
    """

    def __init__(self, settings: Settings, state: StackState, epochs: int) -> None:
        self.home = StackHome(settings.home_path)
        token = self.home.token()
        if token is None:
            raise StackError("the stack has no token")
        self.client = Client(state.api_url, token)
        self._hold = self.home.path.with_name("hold")
        self._hold.touch()
        self._epochs = epochs
        spec = counting_spec(epochs, self._hold, state.store_nodes, bad=True)
        self.id = self.client.submit_directory(spec, idempotency_key="audit").id
        #: URLs of replicated servers by name.
        self.services = service_urls(self.home, state)
        self._state = state
        self.ledger = connect(self.ledger_url)
        self.jobs = Jobs(self.ledger)
        self.provider = LocalProvider(
            self.home.path,
            settings.cluster,
            LocalPoolSpec(name="local", provider="local", max_machines=WORKERS),
        )

    def close(self) -> None:
        self.client.close()
        self.ledger.close()

    def tensors_urls(self) -> list[str]:
        return [self._url(name) for name in part_names("tensors", self._state.store_nodes)]

    @property
    def ledger_url(self) -> str:
        return self._url("ledger")

    def _url(self, name: str) -> str:
        password, port = self.home.ensure_password(name), self._state.ports[name]
        return self.services.get(name) or f"redis://:{password}@127.0.0.1:{port}/0"

    def has_ended(self) -> bool:
        """Return True if the job has ended. A ledger that does not answer has not ended it."""
        with contextlib.suppress(Exception):
            return self.jobs.get(self.id).state.over
        return False

    def finish(self, report: CountReport, folder: Path) -> None:
        """Wait for the job and count samples. Raises :class:`StackError` if it did not succeed."""
        self._hold.unlink()
        job = self.client.job(self.id).wait(FINISH_SECONDS)
        report.updates_applied = job.totals.updates
        report.updates_rejected = sum(job.totals.rejected.values())
        if job.state != "succeeded":
            raise StackError(f"the job {job.state}: {job.reason}")
        model = self.client.job(self.id).download(folder / "model.safetensors", "last")
        count = load_file(model)["count"]
        report.count(count, self._epochs, job.progress.samples_skipped * self._state.store_nodes)

    def keep_evidence(self, report: CountReport, folder: Path) -> None:
        """Collect evidence from the running stack into the report and its folder."""
        report.folder = str(folder)
        report.evidence = collect(self.home, self.ledger, self.id)
        copy_ray_logs(StackState.read(self.home.path), folder / "ray")


@contextlib.contextmanager
def audited_job(
    settings: Settings, state: StackState, epochs: int, report: CountReport, folder: Path
) -> Iterator[AuditedJob]:
    """Submit the job; record a failure in the report, with evidence from the running stack."""
    job = AuditedJob(settings, state, epochs)
    try:
        yield job
    except VcasgdError as error:
        report.failure = str(error)
    finally:
        if not report.passed:
            job.keep_evidence(report, folder)
        job.close()


# --- evidence -----------------------------------------------------------------------------------


def collect(home: StackHome, ledger: RedisClient, job: str) -> Evidence:
    """Collect the state of a running stack, without its secrets.

    A source that can't be read contains the error instead.
    """
    state, jobs, control = StackState.read(home.path), Jobs(ledger), Control(ledger)
    sources: dict[str, Callable[[], Iterable[str]]] = {
        "parts": lambda: _parts(state),
        "job": lambda: [_job(jobs, job)],
        "events": lambda: [_event(each) for each in jobs.events(job)[-EVENTS:]],
        "heartbeats": lambda: [
            _heartbeat(*each) for each in sorted(jobs.workers.heartbeats(job).items())
        ],
        "leases": lambda: _rows(jobs.leases(job)),
        "machines": lambda: _rows(control.machines()),
        "pools": lambda: _rows(control.pools()),
    }
    evidence = {title: _read(source) for title, source in sources.items()}
    for log in _logs(home, state):
        title = log.parent.name if log.name == "machine.log" else log.stem
        evidence[f"{title} log"] = last_lines(log, LOG_LINES)
    return {
        title: [home.without_secrets(line)[:LINE_LENGTH] for line in lines]
        for title, lines in evidence.items()
        if lines
    }


def copy_ray_logs(state: StackState, folder: Path) -> None:
    """Copy Ray's logs of each machine, which are removed with the stack."""
    for logs in _ray_logs(state):
        # A machine can stop at any moment and remove its files.
        with contextlib.suppress(OSError):
            for file in logs.iterdir():
                if file.is_file() and 0 < file.stat().st_size <= LARGEST_BYTES:
                    target = folder / logs.parents[1].name
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, target)


def as_lines(evidence: Evidence) -> Iterator[str]:
    for title, lines in evidence.items():
        yield f"{title}:"
        yield from (f"    {line}" for line in lines)


def _read(source: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return list(source())
    except VcasgdError as error:
        return [f"{type(error).__name__}: {error}"]


def _parts(state: StackState) -> Iterator[str]:
    now = time.time()
    for name, part in state.parts.items():
        process = part.process
        life = f"process {part.pid}" if process is not None and process.alive() else "dead"
        ready = "ready" if part.ready else "not ready"
        yield f"{name}: {life}, {ready}, {now - part.started_at:.1f} s old, restart {part.restarts}"


def _job(jobs: Jobs, name: str) -> str:
    job = jobs.get(name)
    return (
        f"{name}: {job.state}, {job.finished_epochs} of {job.epochs} epochs, "
        f"version {job.version}, {job.reason or 'no reason'}"
    )


def _event(event: Mapping[str, Any]) -> str:
    return f"{time.time() - event['at']:.1f} s ago {event['kind']}: {event['text']}"


def _heartbeat(worker: str, beat: Heartbeat) -> str:
    shown = {name: each for name, each in beat.model_dump().items() if name != "at"}
    return f"{worker}: {time.time() - (beat.at or 0.0):.1f} s ago {json.dumps(shown)}"


def _rows(rows: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {json.dumps(row)}" for name, row in sorted(rows.items())]


def _logs(home: StackHome, state: StackState) -> list[Path]:
    """Return the logs of the parts, the newest machines, and the newest workers."""
    machines = _newest(home.path.glob("machines/*/machine.log"))
    workers = _newest(log for logs in _ray_logs(state) for log in logs.glob("worker-*.err"))
    return [*sorted(home.logs.glob("*.log")), *machines, *workers]


def _newest(logs: Iterable[Path]) -> list[Path]:
    times = {}
    for log in logs:
        with contextlib.suppress(OSError):
            times[log] = log.stat().st_mtime
    return sorted(times, key=times.__getitem__)[-NEWEST:]


def _ray_logs(state: StackState) -> list[Path]:
    # The pattern excludes the link to the latest session.
    with contextlib.suppress(OSError):
        return sorted(Path(state.scratch).glob("*/session_2*/logs")) if state.scratch else []
    return []
