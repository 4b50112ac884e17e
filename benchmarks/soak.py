"""Everything at once: an audited job while faults of all kinds repeat for an hour.

    python benchmarks/soak.py [--minutes 60]

Replays a recorded spot history sixty times as fast as it was, and each five minutes kills,
freezes, and disturbs every part of the stack. Writes ``benchmarks/results/soak.md``. Exits with
status 0 only if every fault fired, no sample was lost or repeated, memory and descriptors stayed
flat, and no process is left. Needs root, for a full disk, and a C compiler, for clocks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import machine
from markdown import table
from vcasgd.chaos.audited_job import AuditedJob
from vcasgd.chaos.run import ScenarioReport, run_scenario
from vcasgd.chaos.scenario import Scenario
from vcasgd.errors import StackError, StoreError
from vcasgd.stack import StackState
from vcasgd.store.connection import connect

OUT = HERE / "results" / "soak.md"
TRACE = HERE / "cifar10" / "traces" / "aws-v100-4node-us-east-2a-2023-08-03.json"
MB = 1e6

#: Faults of each cycle, by the second at which they begin. No part has two at a time.
CYCLE_SECONDS = 300
CYCLE: dict[int, dict[str, Any]] = {
    10: {"what": "evict", "where": "worker", "notice": 10},
    25: {"what": "kill", "where": "worker"},
    40: {"what": "kill", "where": "server"},
    60: {"what": "evict", "where": "worker", "notice": 5},
    75: {"what": "kill", "where": "tensors"},
    95: {"what": "kill", "where": "controller"},
    110: {"what": "kill", "where": "worker"},
    125: {"what": "kill", "where": "ledger"},
    145: {"what": "freeze", "where": "server", "for": 5},
    155: {"what": "kill", "where": "api"},
    165: {"what": "evict", "where": "worker", "notice": 20},
    180: {"what": "kill", "where": "head"},
    205: {"what": "freeze", "where": "ledger", "for": 5},
    220: {"what": "kill", "where": "worker"},
    235: {"what": "freeze", "where": "tensors", "for": 5},
    245: {"what": "step-clock", "where": "ledger", "for": 10, "ahead": "2h"},
    260: {"what": "step-clock", "where": "server", "for": 10, "behind": "2h"},
    275: {"what": "full-disk", "where": "storage", "for": 15},
}

#: Processes that every run has to compare.
PROCESSES = ("api", "controller", "head", "ledger", "server", "supervisor", "tensors", "worker")
#: Seconds between two samples, and the age from which a process counts: it has loaded its modules.
SAMPLE_SECONDS, SETTLED_SECONDS = 5.0, 20.0
#: Part of the run at its beginning that is not compared, and parts that are.
WARM_UP, PART = 0.2, 0.25
#: Growth of memory and descriptors that is not a leak: caches, histories up to their limits.
MORE_SHARE, MORE_BYTES, MORE_DESCRIPTORS = 0.15, 15e6, 20


@dataclass(frozen=True)
class Sample:
    """Usage at a moment, in bytes; ``process`` tells a process from its successors."""

    at: float
    process: int
    memory: int
    descriptors: int


def scenario(minutes: float) -> Scenario:
    """Return the faults of a run."""
    seconds = 60 * minutes
    history = {"what": "capacity", "where": "pool", "trace": str(TRACE), "skip": "134h",
               "faster": 60, "when": 3, "for": seconds}  # fmt: skip
    faults = [history]
    for at, fault in CYCLE.items():
        times = math.ceil((seconds - at) / CYCLE_SECONDS)
        if times > 0:
            repeated = {"every": CYCLE_SECONDS, "times": times} if times > 1 else {}
            faults.append({**fault, "when": at, **repeated})
    # How long machines are away is the history's, and faults overlap.
    expect = {"lost_machines": 10**6, "max_pause": "1h"}
    return Scenario.model_validate({"faults": faults, "expect": expect})


class Sampler:
    """Samples the processes of a stack until the end of the ``with`` block."""

    def __init__(self) -> None:
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self.home = Path()
        #: Names of all machines.
        self.machines: set[str] = set()
        self._stopped = threading.Event()
        #: Error that ended the thread.
        self.error: Exception | None = None

    @contextlib.contextmanager
    def watch(self, job: AuditedJob) -> Iterator[None]:
        self.home = job.home.path
        thread = threading.Thread(target=self._run, args=(job,), name="sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _run(self, job: AuditedJob) -> None:
        try:
            while not self._stopped.wait(SAMPLE_SECONDS):
                self._sample(job)
        except Exception as error:  # noqa: BLE001 - fails the run
            self.error = error

    def _sample(self, job: AuditedJob) -> None:
        state = StackState.read(self.home)
        for name, part in (*state.parts.items(), ("supervisor", state.supervisor)):
            self._add(name, part.pid)
        for one in job.provider.machines():
            self.machines.add(one.id)
            # A worker is the largest process of its machine.
            pids = [each.pid for each in job.provider.processes(one.id)]
            self._add("worker", max(pids, key=_memory, default=0))
        for name in ("ledger", "tensors"):
            # Whatever a server keeps: it may be dead at this moment.
            with contextlib.suppress(StoreError):
                self._add_data(name, job.ledger_url if name == "ledger" else job.tensors_urls()[0])

    def _add(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            process = psutil.Process(pid)
            if pid and time.time() - process.create_time() >= SETTLED_SECONDS:
                sample = Sample(time.time(), pid, _memory(pid), process.num_fds())
                self.samples[name].append(sample)

    def _add_data(self, name: str, url: str) -> None:
        client = connect(url, answer_seconds=1.0)
        try:
            used, keys = int(client.info("memory")["used_memory"]), client.dbsize()
        finally:
            client.close()
        self.samples[f"{name}: data"].append(Sample(time.time(), 0, used, keys))


def _memory(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def compare(samples: list[Sample]) -> tuple[Sample, Sample] | None:
    """Return the medians of an early and of the last part of a run; None for too few samples."""
    settled = samples[int(WARM_UP * len(samples)) :]
    count = int(PART * len(settled))
    if count < 3:
        return None
    return _medians(settled[:count]), _medians(settled[-count:])


def _medians(samples: list[Sample]) -> Sample:
    return Sample(
        median(each.at for each in samples),
        0,
        round(median(each.memory for each in samples)),
        round(median(each.descriptors for each in samples)),
    )


def leaks(sampler: Sampler) -> list[str]:
    """Return what grew, or was left."""
    found = [f"the sampler ended: {sampler.error}"] if sampler.error else []
    for name in {*sampler.samples, *PROCESSES}:
        pair = compare(sampler.samples[name])
        if pair is None:
            found.append(f"{name}: only {len(sampler.samples[name])} samples; take more minutes")
            continue
        early, late = pair
        if late.memory > early.memory * (1 + MORE_SHARE) + MORE_BYTES:
            found.append(f"{name}: {early.memory / MB:.0f} MB became {late.memory / MB:.0f} MB")
        if late.descriptors > early.descriptors * (1 + MORE_SHARE) + MORE_DESCRIPTORS:
            what = "keys" if "data" in name else "descriptors"
            found.append(f"{name}: {early.descriptors} {what} became {late.descriptors}")
    return found + [f"process {each} is left" for each in leftovers(sampler.home)]


def leftovers(home: Path) -> list[str]:
    """Return the processes that belong to a stack in a folder."""
    found = []
    for each in psutil.process_iter(["pid", "cmdline", "environ"]):
        texts = [*(each.info["cmdline"] or []), *(each.info["environ"] or {}).values()]
        if each.pid != psutil.Process().pid and any(str(home) in text for text in texts):
            found.append(f"{each.pid} ({' '.join(each.info['cmdline'] or [])[:80]})")
    return found


PAGE = """\
# Everything at once

    {command}

An audited job on a stack of its own, for {minutes:g} minutes. Its machines come and go as in a
recorded spot history, sixty times as fast. In each five minutes, machines are lost with and without
notice, every part is killed, parts are frozen, clocks are stepped, and a disk is full. {verdict}

{machine}

- samples: {report.samples_expected:,} expected, {report.samples_applied:,} applied,
  {report.samples_lost} lost, {report.samples_repeated} repeated
- updates: {report.updates_applied:,} applied, {report.updates_rejected:,} rejected
- faults that fired: {faults}
- machines, up to three at a time: {machines}; restarts: {restarts}

Medians of an early quarter and of the last one, after the first fifth of the run, of processes that
are at least {settled:g} s old. *Descriptors* are open files and sockets of a process, and keys of a
server's data.

{table}
"""


def page(minutes: float, report: ScenarioReport, sampler: Sampler, problems: list[str]) -> str:
    rows = []
    for name, samples in sorted(sampler.samples.items()):
        if (pair := compare(samples)) is not None:
            early, late = pair
            lives = len({each.process for each in samples})
            rows.append(
                [name, "" if "data" in name else str(lives), f"{early.memory / MB:.1f} MB",
                 f"{late.memory / MB:.1f} MB", str(early.descriptors), str(late.descriptors)]
            )  # fmt: skip
    kinds = Counter(" ".join(str(each["fault"]).split()[:2]) for each in report.faults)
    headings = ("", "processes", "memory early", "late", "descriptors early", "late")
    return PAGE.format(
        command=f"python benchmarks/soak.py --minutes {minutes:g}",
        minutes=minutes,
        verdict="It passed." if not problems else f"It failed: {'; '.join(problems)}.",
        machine=table(("", ""), machine.describe().items()),
        report=report,
        faults=", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())) or "none",
        restarts=", ".join(f"{count} × {name}" for name, count in sorted(report.restarts.items())),
        machines=len(sampler.machines),
        settled=SETTLED_SECONDS,
        table=table(headings, rows),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    sampler = Sampler()
    report = run_scenario(
        scenario(options.minutes), log=lambda text: print(text, flush=True), watch=sampler.watch
    )
    problems = [report.failure] if report.failure else []
    if not report.passed and not problems:
        problems.append("samples were lost or repeated")
    problems += leaks(sampler)
    text = page(options.minutes, report, sampler, problems)
    options.out.write_text(text)
    print(text)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StackError as error:
        sys.exit(f"error: {error}")
