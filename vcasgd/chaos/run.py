"""Run of a scenario on a stack of its own, with the audit's count in the end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vcasgd.chaos.audited_job import (
    WORKERS,
    AuditedJob,
    CountReport,
    audited_job,
    epochs_for,
    own_settings,
    report_folder,
)
from vcasgd.chaos.faults import (
    Clocks,
    await_fault,
    freeze,
    full_disk,
    limited_capacity,
    slow_fsync,
    small_disk,
    step_clock,
)
from vcasgd.chaos.killers import Killer, Target
from vcasgd.chaos.network import ControlGroup, packet_loss
from vcasgd.chaos.scenario import Injection, Scenario, max_gap, schedule, shortfalls
from vcasgd.errors import StackError, StoreError, VcasgdError
from vcasgd.stack import StackHome, StackState, running
from vcasgd.store.connection import connect
from vcasgd.store.keys import TensorKeys
from vcasgd.store.tensors.snapshot_store import SnapshotStore

#: Seconds after the last fault in which its later effects show, such as machines that are replaced.
SETTLE_SECONDS = 15.0
#: Seconds of training for which the job has work, beyond the schedule.
SPARE_SECONDS = 60.0
#: Seconds for an answer of the tensors server, and between two questions.
ANSWER_SECONDS, POLL_SECONDS = 1.0, 0.1


@dataclass
class ScenarioReport(CountReport):
    """Report of a scenario; ``vcasgd chaos run --json`` prints its fields."""

    #: For each fault: what it was, and the longest time without progress until the next one;
    #: for ``drop``, also how many packets were lost.
    faults: list[dict[str, Any]] = field(default_factory=list)
    #: Machines that were lost between the first fault and the end.
    lost_machines: int = 0
    #: Restarts of the parts of the stack in the same time.
    restarts: dict[str, int] = field(default_factory=dict)


def run_scenario(
    scenario: Scenario,
    log: Callable[[str], None],
    watch: Callable[[AuditedJob], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> ScenarioReport:
    """Run a scenario on its own stack. Keeps the stack's folder only if the run fails.

    ``watch`` is entered while faults are injected. Raises
    :class:`~vcasgd.errors.StackError` if the stack does not start.
    """
    plan, report = schedule(scenario, WORKERS), ScenarioReport()
    full = any(each.what == "full-disk" for each in plan)
    epochs = epochs_for(max(each.end for each in plan) + SETTLE_SECONDS + SPARE_SECONDS)
    with report_folder(report) as folder:
        settings = own_settings(folder / "home")
        with (
            small_disk(StackHome(settings.home_path).storage) if full else nullcontext(),
            _clocks_for(plan, folder / "clocks") as clocks,
            running(settings) as state,
            audited_job(settings, state, epochs, report, folder) as job,
        ):
            with (
                _ScenarioRun(job, settings.heartbeat, report, log, plan, clocks) as run,
                watch(job),
            ):
                pauses = run.inject_all()
            job.finish(report, folder)
            problems = shortfalls(
                scenario.expect,
                lost_samples=report.samples_lost,
                repeated_samples=report.samples_repeated,
                lost_machines=report.lost_machines,
                pauses=pauses,
            )
            if problems:
                raise StackError("; ".join(problems))
    return report


@contextmanager
def _clocks_for(plan: list[Injection], folder: Path) -> Iterator[Clocks | None]:
    if any(each.what == "step-clock" for each in plan):
        clocks = Clocks(folder)
        with clocks.for_children():
            yield clocks
    else:
        yield None


class _ScenarioRun:
    """Injects the faults of a schedule while the audited job trains."""

    def __init__(
        self,
        job: AuditedJob,
        heartbeat: float,
        report: ScenarioReport,
        log: Callable[[str], None],
        plan: list[Injection],
        clocks: Clocks | None,
    ) -> None:
        self._job = job
        self._clocks = clocks
        self._plan = plan
        self._report = report
        self._print = log
        self._killer = Killer(
            job.home, job.provider, job.jobs, job.id, heartbeat=heartbeat, services=job.services
        )
        self._errors: list[str] = []
        #: Lost packets by fault.
        self._dropped: dict[Injection, int] = {}
        #: Processes of the machine whose network fails.
        self._group: ControlGroup | None = None
        self._victim: str | None = None

    def __enter__(self) -> _ScenarioRun:
        if any(each.what == "drop" for each in self._plan):
            self._group = ControlGroup()
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.close()

    def inject_all(self) -> list[tuple[Injection, float]]:
        """Return each fault with its longest time without progress.

        Raises :class:`StackError` if a fault did not fire or training does not go on.
        """
        plan = self._plan
        await_fault(self._all_machines_train, "not all machines train")
        machines, restarts = self._machines(), self._restarts()
        with Progress(self._job) as progress:
            start = time.monotonic()
            threads = [
                threading.Thread(target=self._inject, args=(each, start), daemon=True)
                for each in plan
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self._errors:
                raise StackError("; ".join(self._errors))
            self._settle(progress)
            end = time.monotonic()
        self._report.lost_machines = len(machines - self._machines())
        self._report.restarts = {
            name: count - restarts[name]
            for name, count in self._restarts().items()
            if count > restarts[name]
        }
        pauses = _pauses(plan, progress.moments, start, end)
        self._report.faults = [
            {"fault": str(each), "at": each.at, "pause": round(pause, 1)}
            | ({"dropped_packets": self._dropped[each]} if each in self._dropped else {})
            for each, pause in pauses
        ]
        return pauses

    def _all_machines_train(self) -> bool:
        self._group_a_machine()
        return len(self._killer.busy_machines()) >= WORKERS

    def _group_a_machine(self) -> None:
        """Move a machine's processes to the group for its network, before they open connections."""
        if self._group is None:
            return
        if self._victim is None:
            self._victim = min(self._machines(), default=None)
        if self._victim is not None:
            found = {each.pid for each in self._job.provider.processes(self._victim)}
            self._group.take(found - self._group.processes())

    def _settle(self, progress: Progress) -> None:
        """Wait for progress after the last fault, and then for its later effects."""
        ended = time.monotonic()
        await_fault(lambda: progress.moments[-1] > ended, "no progress after the last fault")
        if self._victim is not None:
            await_fault(
                lambda: self._victim in {one.id for one in self._killer.busy_machines()},
                f"no training on {self._victim} after the last fault",
            )
        time.sleep(SETTLE_SECONDS)
        if self._job.has_ended():
            raise StackError("the job ended before the scenario did")

    def _inject(self, injection: Injection, start: float) -> None:
        time.sleep(max(0.0, start + injection.at - time.monotonic()))
        self._print(f"{injection.at:6.1f} s: {injection}")
        try:
            if injection.what in ("kill", "evict"):
                self._take(injection)
                return
            with self._lasting(injection) as dropped:
                time.sleep(injection.seconds)
                if dropped is not None:
                    self._dropped[injection] = dropped()
        except (VcasgdError, OSError) as error:
            self._errors.append(f"{injection}: {error}")

    def _take(self, injection: Injection) -> None:
        if injection.what == "evict":
            self._killer.take_worker(Target.WORKER_NOTICE, random.Random(), injection.notice)
        elif injection.where == "worker":
            self._killer.fire(Target.WORKER, random.Random())
        else:
            self._killer.kill_part(injection.where, random.Random())

    def _lasting(self, injection: Injection) -> AbstractContextManager[Callable[[], int] | None]:
        if injection.counts is not None:
            return limited_capacity(self._job.provider, injection.counts)
        if injection.what == "full-disk":
            return full_disk(self._job.home.storage)
        if injection.direction and self._group is not None:
            name = self._killer.name_of(injection.where, random.Random())
            port = StackState.read(self._job.home.path).ports[name]
            return packet_loss(name, self._group, port, injection.direction)
        if injection.what == "step-clock" and injection.where == "worker":
            return self._step_clock_of_a_machine(injection)
        name, process, find = self._killer.processes_of_a_part(injection.where, random.Random())
        if injection.what == "slow-fsync":
            return slow_fsync(name, process, injection.delay)
        if self._clocks is not None and injection.what == "step-clock":
            return step_clock(name, self._clocks, find, round(injection.step))
        return freeze(name, find)

    def _step_clock_of_a_machine(self, injection: Injection) -> AbstractContextManager[None]:
        assert self._clocks is not None
        name = random.choice(self._killer.await_busy()).id
        processes = partial(self._job.provider.processes, name)
        return step_clock(name, self._clocks, processes, round(injection.step))

    def _machines(self) -> set[str]:
        return {one.id for one in self._job.provider.machines()}

    def _restarts(self) -> dict[str, int]:
        parts = StackState.read(self._job.home.path).parts
        return {name: part.restarts for name, part in parts.items()}


class Progress(threading.Thread):
    """Records when the model's version changes, from the tensors server alone."""

    def __init__(self, job: AuditedJob) -> None:
        super().__init__(name="progress", daemon=True)
        self._client = connect(job.tensors_urls()[0], answer_seconds=ANSWER_SECONDS)
        self._snapshots = SnapshotStore(self._client, TensorKeys(job.id, 0))
        self._stopped = threading.Event()
        #: Times of the changes, by :func:`time.monotonic`; the first is the beginning.
        self.moments = [time.monotonic()]

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()
        self._client.close()

    def run(self) -> None:
        """Watch until the end of the ``with`` block."""
        version = 0
        while not self._stopped.wait(POLL_SECONDS):
            # A frozen server makes no progress.
            with suppress(StoreError):
                newest = self._snapshots.version()
                if newest != version:
                    self.moments.append(time.monotonic())
                version = newest


def _pauses(
    plan: list[Injection], moments: list[float], start: float, end: float
) -> list[tuple[Injection, float]]:
    """Return each fault with the longest time without progress until the next fault."""
    begins = [*(start + each.at for each in plan), end]
    return [
        (each, max_gap(moments, since, until))
        for each, since, until in zip(plan, begins[:-1], begins[1:], strict=True)
    ]


def describe_scenario(report: ScenarioReport) -> Iterator[str]:
    """Yield the report as lines of text."""
    for fault in report.faults:
        dropped = f", {fault['dropped_packets']} packets lost" if "dropped_packets" in fault else ""
        yield f"{fault['fault']}: longest time without progress {fault['pause']} s{dropped}"
    restarts = ", ".join(f"{count} × {name}" for name, count in sorted(report.restarts.items()))
    yield f"machines lost: {report.lost_machines}; restarts: {restarts or 'none'}"
    yield from report.describe_counts()
