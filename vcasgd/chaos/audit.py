"""Audit that kills all kinds of processes during a job and checks the count of every sample."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from vcasgd.chaos.audited_job import (
    AuditedJob,
    CountReport,
    audited_job,
    epochs_for,
    own_settings,
    report_folder,
)
from vcasgd.chaos.killers import Fault, Killer, Target
from vcasgd.errors import SpecError, StackError
from vcasgd.stack import running

#: Seconds for one recovery. A machine of the local pool boots in about ten seconds, but in many
#: times that on a busy computer.
RECOVERY_SECONDS = 300.0
#: Seconds of training by three workers for each kill; determines the length of the job.
SECONDS_PER_KILL = 20.0
#: Seconds between two heartbeats.
HEARTBEAT = 0.5
POLL_SECONDS = 0.05
#: Targets in a stack without replicas.
UNREPLICATED = tuple(target for target in Target if target is not Target.FAILOVER)
_SERVERS = frozenset({Target.LEDGER, Target.TENSORS})
#: Range of seconds between the recovery from one group and the next group.
PAUSE_SECONDS = (0.3, 3.0)
#: Sizes of groups, drawn with equal probability.
GROUP_SIZES = (1, 1, 1, 2, 2, 3)
#: Probability that a group does not wait for the recovery from the previous one.
OVERLAP = 0.25

#: Callback that prints progress.
Print = Callable[[str], None]


@dataclass(frozen=True)
class KillGroup:
    """Simultaneous kills.

    They happen ``pause`` seconds after the previous group if it ``overlaps``, or else after the
    recovery from it.
    """

    targets: tuple[Target, ...]
    pause: float
    overlaps: bool


def plan_kills(
    kills: int, rng: random.Random, among: Sequence[Target] = UNREPLICATED
) -> list[KillGroup]:
    """Return a plan with exactly ``kills`` kills, each target at least once, some at once.

    Raises :class:`SpecError` if there are fewer kills than targets.
    """
    if kills < len(among):
        raise SpecError(
            f"kills: {kills} is less than the number of targets, {len(among)}",
            remedy=f"use at least {len(among)}",
            field="kills",
        )
    targets = [*among, *rng.choices(list(among), k=kills - len(among))]
    rng.shuffle(targets)
    groups: list[KillGroup] = []
    while targets:
        group = _group(targets, max(rng.choice(GROUP_SIZES), 1 if groups else 2))
        overlaps = bool(groups) and rng.random() < OVERLAP
        groups.append(KillGroup(group, rng.uniform(*PAUSE_SECONDS), overlaps))
    return groups


def _excludes(group: list[Target], target: Target) -> bool:
    """Return True if the target can't die together with the group.

    Only one of a server and its replica can die at a time.
    """
    pair = {Target.FAILOVER} & {*group, target} and _SERVERS & {*group, target}
    return target in group or bool(pair)


def _group(targets: list[Target], size: int) -> tuple[Target, ...]:
    """Remove up to ``size`` targets from the list and return them.

    A part of the stack can die only once at a time; any number of machines can die.
    """
    group: list[Target] = []
    for target in list(targets):
        repeatable = target in (Target.WORKER, Target.WORKER_NOTICE)
        if len(group) < size and (repeatable or not _excludes(group, target)):
            group.append(target)
            targets.remove(target)
    return tuple(group)


@dataclass
class AuditReport(CountReport):
    """Report of an audit; ``vcasgd chaos audit --json`` prints its fields."""

    seed: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    recovery_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def audit(
    log: Print,
    beside: Callable[[AuditedJob], AbstractContextManager[None]] = lambda _: nullcontext(),
    *,
    kills: int,
    seed: int = 7,
    store_nodes: int = 1,
    replicas: int = 0,
) -> AuditReport:
    """Run an audit on its own stack. Keeps the stack's folder only if the audit fails.

    ``beside`` returns what else happens on the stack during the kills.
    Raises :class:`~vcasgd.errors.SpecError` for too few kills, and
    :class:`~vcasgd.errors.StackError` if the stack does not start.
    """
    rng = random.Random(seed)
    groups = plan_kills(kills, rng, tuple(Target) if replicas else UNREPLICATED)
    log(f"seed {seed}: {kills} kills in {len(groups)} groups")
    report = AuditReport(seed=seed)
    with report_folder(report) as folder:
        settings = own_settings(
            folder / "home",
            heartbeat=HEARTBEAT,
            store_nodes=store_nodes,
            replicas=replicas,
        )
        epochs = epochs_for(kills * SECONDS_PER_KILL)
        with (
            running(settings) as state,
            audited_job(settings, state, epochs, report, folder) as job,
        ):
            run = _Run(job, report, log)
            with beside(job):
                run.kill_all(groups, rng)
            run.finish(folder)
    return report


class _Run:
    """One audit on a running stack."""

    def __init__(self, job: AuditedJob, report: AuditReport, log: Print) -> None:
        self._job = job
        self._report = report
        self._print = log
        self._killer = Killer(
            job.home, job.provider, job.jobs, job.id,
            heartbeat=HEARTBEAT, services=job.services,
        )  # fmt: skip
        self._recoveries: defaultdict[str, list[float]] = defaultdict(list)
        self._fired: list[str] = []
        self._watchers: list[threading.Thread] = []
        self._problems: list[str] = []

    # -- killing ----------------------------------------------------------------------------------

    def kill_all(self, groups: list[KillGroup], rng: random.Random) -> None:
        """Execute the plan. Raises :class:`StackError` if a fault did not fire."""
        try:
            for group in groups:
                if not group.overlaps:
                    self._await_recovery()
                time.sleep(group.pause)
                self._kill(group, rng)
            self._await_recovery()
        finally:
            self._report.kills = dict(Counter(self._fired))

    def _kill(self, group: KillGroup, rng: random.Random) -> None:
        if self._job.has_ended():
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

    def _watch(self, fault: Fault) -> None:
        # Threads of a group append at the same time, which needs no lock.
        self._fired.append(fault.target)
        self._report.faults.append(f"{fault.target}: {fault.name}")
        watcher = threading.Thread(target=self._measure, args=(fault,), daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _measure(self, fault: Fault) -> None:
        deadline = fault.at + RECOVERY_SECONDS
        while time.time() < deadline:
            with suppress(Exception):
                if fault.recovered():
                    self._recoveries[str(fault.target)].append(time.time() - fault.at)
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

    def finish(self, folder: Path) -> None:
        """Wait for the job and count samples. Raises :class:`StackError` if it did not succeed."""
        self._print("all faults fired; waiting for the job")
        self._report.recovery_seconds = {
            target: {"median": round(statistics.median(times), 2), "max": round(max(times), 2)}
            for target, times in sorted(self._recoveries.items())
        }
        self._job.finish(self._report, folder)


def describe(report: AuditReport) -> Iterator[str]:
    """Yield the report as lines of text."""
    killed = ", ".join(f"{count} × {target}" for target, count in sorted(report.kills.items()))
    yield f"killed: {killed}"
    for target, seconds in report.recovery_seconds.items():
        median, most = seconds["median"], seconds["max"]
        yield f"  {target}: recovered after {median} s (median), {most} s (max)"
    yield from report.describe_counts()
