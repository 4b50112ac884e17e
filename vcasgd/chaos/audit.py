"""Audit that kills all kinds of processes during a job and checks the count of every sample."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from vcasgd.chaos.evidence import Evidence, as_lines, collect, copy_ray_logs
from vcasgd.chaos.killers import Fault, Killer, Target, audit_task
from vcasgd.chaos.plan import UNREPLICATED, KillGroup, plan_kills
from vcasgd.client import Client
from vcasgd.errors import StackError, VcasgdError
from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.stack.layout import service_urls
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

#: Seconds for one recovery. A machine of the local pool boots in about ten seconds, but in many
#: times that on a busy computer.
RECOVERY_SECONDS = 300.0
#: Seconds for the job after the last kill.
FINISH_SECONDS = 600.0
#: Seconds of training by three workers for each kill; determines the length of the job.
SECONDS_PER_KILL = 20.0
STEP_SECONDS = 0.1
BATCH_SIZE = 5
SUBTASKS_PER_EPOCH = 20
SAMPLES = 2000
WORKERS = 3
POLL_SECONDS = 0.05

#: Callback that prints progress.
Print = Callable[[str], None]


@dataclass
class AuditReport:
    """Report of an audit; ``vcasgd chaos audit --json`` prints its fields."""

    seed: int
    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    samples_expected: int = 0
    samples_applied: int = 0
    samples_lost: int = 0
    samples_repeated: int = 0
    updates_applied: int = 0
    updates_rejected: int = 0
    recovery_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    failure: str | None = None
    #: Folder and evidence of a failed audit.
    folder: str | None = None
    evidence: Evidence = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if no sample was lost or repeated, and every fault fired."""
        return self.failure is None and not self.samples_lost and not self.samples_repeated


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit. By default, ``epochs`` is long enough for the kills."""

    kills: int = 12
    seed: int = 7
    epochs: int | None = None
    heartbeat: float = 0.5
    store_nodes: int = 1
    replicas: int = 0


def audit(options: AuditOptions, log: Print) -> AuditReport:
    """Run an audit on its own stack. Keeps the stack's folder only if the audit fails.

    Raises :class:`~vcasgd.errors.SpecError` for too few kills, and
    :class:`~vcasgd.errors.StackError` if the stack does not start.
    """
    rng = random.Random(options.seed)
    groups = plan_kills(options.kills, rng, tuple(Target) if options.replicas else UNREPLICATED)
    log(f"seed {options.seed}: {options.kills} kills in {len(groups)} groups")
    report, started = AuditReport(options.seed), time.monotonic()
    with _folder(report) as folder:
        settings = _settings(folder / "home", options)
        with running(settings) as state:
            run = _Run(settings, state, options, report, log)
            try:
                run.kill_all(groups, rng)
                run.finish(folder / "model.safetensors")
            except VcasgdError as error:
                report.failure = str(error)
            finally:
                if not report.passed:
                    run.keep_evidence(folder)
                run.close()
    report.seconds = round(time.monotonic() - started, 1)
    return report


@contextlib.contextmanager
def _folder(report: AuditReport) -> Iterator[Path]:
    """Create a temporary folder, and remove it unless the report refers to it."""
    folder = Path(tempfile.mkdtemp(prefix="vcasgd-audit-"))
    try:
        yield folder
    finally:
        if report.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def _settings(home: Path, options: AuditOptions) -> Settings:
    return Settings(
        home=home,
        api_port=0,
        heartbeat=options.heartbeat,
        local_capacity=WORKERS,
        ledger_url=None,
        tensors_url=None,
        store_nodes=options.store_nodes,
        replicas=options.replicas,
        storage_url=None,
        token=None,
    )


def audit_spec(options: AuditOptions, hold: Path | None = None) -> JobSpec:
    """Return a job that lasts longer than the kills, in which every sample has weight 1.

    With ``hold``, the job ends soon after that file is removed.
    """
    steps_per_epoch = SAMPLES / BATCH_SIZE
    seconds_per_epoch = steps_per_epoch * STEP_SECONDS / WORKERS
    epochs = options.epochs or max(2, round(options.kills * SECONDS_PER_KILL / seconds_per_epoch))
    return JobSpec.parse(
        {
            "name": "audit",
            "task": "audit:Audit",
            "working_dir": str(audit_task()),
            "args": {
                "samples": SAMPLES,
                "batch_size": BATCH_SIZE,
                "step_seconds": STEP_SECONDS,
                "hold": str(hold) if hold else None,
                # Each store node counts all samples.
                "copies": options.store_nodes,
            },
            "epochs": epochs,
            "subtasks_per_epoch": SUBTASKS_PER_EPOCH,
            "push_every": 4,
            "update": {"rule": "async-local-sgd", "eta": 1.0},
            "workers": {"min": 1, "max": WORKERS},
            "checkpoint": {"every": "5s", "keep": 3},
        }
    )


class _Run:
    """One audit on a running stack."""

    def __init__(
        self,
        settings: Settings,
        state: StackState,
        options: AuditOptions,
        report: AuditReport,
        log: Print,
    ) -> None:
        self._report = report
        self._print = log
        home = StackHome(settings.home_path)
        token = home.token()
        if token is None:
            raise StackError("the stack has no token")
        self._client = Client(state.api_url, token)
        self._hold = home.path.with_name("hold")
        self._hold.touch()
        self._spec = audit_spec(options, self._hold)
        self._job = self._client.submit_directory(self._spec, idempotency_key="audit").id
        services = service_urls(home, state)
        ledger_url = services.get("ledger") or _ledger_url(home, state)
        provider = LocalProvider(home.path, settings.cluster, LocalPool("local", WORKERS))
        self._home = home
        self._ledger = connect(ledger_url)
        self._jobs = Jobs(self._ledger)
        self._killer = Killer(
            home, provider, self._jobs, self._job,
            heartbeat=options.heartbeat, services=services,
        )  # fmt: skip
        self._recoveries: defaultdict[str, list[float]] = defaultdict(list)
        self._watchers: list[threading.Thread] = []
        self._problems: list[str] = []

    def close(self) -> None:
        self._client.close()
        self._ledger.close()

    def keep_evidence(self, folder: Path) -> None:
        """Collect evidence from the running stack."""
        self._report.folder = str(folder)
        self._report.evidence = collect(self._home, self._ledger, self._job)
        copy_ray_logs(StackState.read(self._home.path), folder / "ray")

    # -- killing ----------------------------------------------------------------------------------

    def kill_all(self, groups: list[KillGroup], rng: random.Random) -> None:
        """Execute the plan. Raises :class:`StackError` if a fault did not fire."""
        for group in groups:
            if not group.overlaps:
                self._await_recovery()
            time.sleep(group.pause)
            self._kill(group, rng)
        self._await_recovery()

    def _kill(self, group: KillGroup, rng: random.Random) -> None:
        if self._job_has_ended():
            raise StackError("the job ended before all faults had fired")
        self._print("kill " + ", ".join(group.targets))
        errors: list[str] = []

        def fire(target: Target, seed: float) -> None:
            try:
                self._watch(self._killer.fire(target, random.Random(seed)))
            except StackError as error:
                errors.append(str(error))

        threads = [
            threading.Thread(target=fire, args=(target, rng.random())) for target in group.targets
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise StackError("; ".join(errors))

    def _job_has_ended(self) -> bool:
        # A killed ledger does not answer, and then the job has not ended either.
        with contextlib.suppress(Exception):
            return self._jobs.get(self._job).state.over
        return False

    def _watch(self, fault: Fault) -> None:
        kills = Counter(self._report.kills)
        kills[fault.target.value] += 1
        self._report.kills = dict(kills)
        self._report.faults.append(f"{fault.target}: {fault.name}")
        watcher = threading.Thread(target=self._measure, args=(fault,), daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _measure(self, fault: Fault) -> None:
        deadline = fault.at + RECOVERY_SECONDS
        while time.time() < deadline:
            with contextlib.suppress(Exception):
                if fault.recovered():
                    self._recoveries[fault.target.value].append(time.time() - fault.at)
                    return
            time.sleep(POLL_SECONDS)
        self._problems.append(f"no recovery from {fault.target} ({fault.name})")

    def _await_recovery(self) -> None:
        for watcher in self._watchers:
            watcher.join()
        self._watchers.clear()
        if self._problems:
            raise StackError("; ".join(self._problems))

    # -- counting ---------------------------------------------------------------------------

    def finish(self, model: Path) -> None:
        """Wait for the job and count samples. Raises :class:`StackError` if it did not succeed."""
        self._print("all faults fired; waiting for the job")
        self._hold.unlink()
        job = self._client.wait(self._job, FINISH_SECONDS)
        report = self._report
        report.updates_applied = job.totals.updates
        report.updates_rejected = sum(job.totals.rejected.values())
        report.recovery_seconds = {
            target: {"median": round(statistics.median(times), 2), "max": round(max(times), 2)}
            for target, times in sorted(self._recoveries.items())
        }
        if job.state != "succeeded":
            raise StackError(f"the job {job.state}: {job.reason}")
        assert self._spec.epochs is not None, "set by the audit"
        count_samples(_counts(self._client.download(self._job, model)), self._spec.epochs, report)


def count_samples(counts: Tensor, epochs: int, report: AuditReport) -> None:
    """Count samples in the final vector; each coordinate should be the number of epochs."""
    report.samples_expected = counts.numel() * epochs
    report.samples_lost = int((epochs - counts).clamp(min=0).sum())
    report.samples_repeated = int((counts - epochs).clamp(min=0).sum())
    report.samples_applied = report.samples_expected - report.samples_lost


def _counts(model: Path) -> Tensor:
    return load_file(model)["count"]


def _ledger_url(home: StackHome, state: StackState) -> str:
    password = home.ensure_password("ledger")
    return f"redis://:{password}@127.0.0.1:{state.ports['ledger']}/0"


def describe(report: AuditReport) -> Iterator[str]:
    """Yield the report as lines of text."""
    killed = ", ".join(f"{count} × {target}" for target, count in sorted(report.kills.items()))
    yield f"killed: {killed}"
    for target, seconds in report.recovery_seconds.items():
        median, most = seconds["median"], seconds["max"]
        yield f"  {target}: recovered after {median} s (median), {most} s (max)"
    yield (
        f"samples: {report.samples_expected} expected, {report.samples_applied} applied, "
        f"{report.samples_lost} lost, {report.samples_repeated} repeated"
    )
    yield f"updates: {report.updates_applied} applied, {report.updates_rejected} rejected"
    if report.failure:
        yield f"failed: {report.failure}"
    yield from as_lines(report.evidence)
    if report.folder:
        yield f"logs and data are in {report.folder}"
    yield f"{'passed' if report.passed else 'FAILED'} in {report.seconds} s"


def as_json(report: AuditReport) -> dict[str, Any]:
    return {**vars(report), "passed": report.passed}
