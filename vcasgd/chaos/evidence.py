"""What a failed audit leaves for whoever looks for the cause."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vcasgd.errors import VcasgdError
from vcasgd.stack import StackHome, StackState
from vcasgd.stack.home import last_lines
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control

#: enough to see what each part did last, and little enough for a test's report
LOG_LINES = 12
LINE_LENGTH = 240
EVENTS = 15
#: machines and workers whose logs are shown, the newest
NEWEST = 4
#: larger files of Ray's are left out
LARGEST_BYTES = 1_000_000

#: what was looked at, and what it said, line by line
Evidence = dict[str, list[str]]


def gather(home: StackHome, ledger: RedisClient, job: str) -> Evidence:
    """What a stack that still runs says of itself; what can't be asked says why.

    None of the stack's secrets is in it.
    """
    state, jobs, control = StackState.read(home.path), Jobs(ledger), Control(ledger)
    looks: dict[str, Callable[[], Iterable[str]]] = {
        "parts": lambda: _parts(state),
        "job": lambda: [_job(jobs, job)],
        "events": lambda: [_event(each) for each in jobs.events(job)[-EVENTS:]],
        "heartbeats": lambda: [_beat(*each) for each in sorted(jobs.workers(job).items())],
        "leases": lambda: _rows(jobs.leases(job)),
        "machines": lambda: _rows(control.instances()),
        "pools": lambda: _rows(control.pools()),
    }
    found = {what: _answer(look) for what, look in looks.items()}
    found |= {f"{_title(log)} ends": last_lines(log, LOG_LINES) for log in _logs(home, state)}
    return {
        what: [home.without_secrets(line)[:LINE_LENGTH] for line in lines]
        for what, lines in found.items()
        if lines
    }


def keep_logs_of_ray(state: StackState, folder: Path) -> None:
    """Copies what Ray wrote on each machine, which goes with the stack."""
    for logs in _ray_logs(state):
        # a machine may go at any moment, and its files with it
        with contextlib.suppress(OSError):
            for file in logs.iterdir():
                if file.is_file() and 0 < file.stat().st_size <= LARGEST_BYTES:
                    target = folder / logs.parents[1].name
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, target)


def lines_of(evidence: Evidence) -> Iterator[str]:
    """For people."""
    for what, lines in evidence.items():
        yield f"{what}:"
        yield from (f"    {line}" for line in lines)


def _answer(look: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return list(look())
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
        f"{name}: {job.state}, {job.finished_epochs} of {job.spec.epochs} epochs, "
        f"version {job.version}, {job.reason or 'no reason'}"
    )


def _event(event: Mapping[str, Any]) -> str:
    return f"{time.time() - event['at']:.1f} s ago {event['kind']}: {event['text']}"


def _beat(worker: str, beat: Heartbeat) -> str:
    shown = {name: each for name, each in beat.to_json().items() if name != "at"}
    return f"{worker}: {time.time() - (beat.at or 0.0):.1f} s ago {json.dumps(shown)}"


def _rows(rows: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {json.dumps(row)}" for name, row in sorted(rows.items())]


def _logs(home: StackHome, state: StackState) -> list[Path]:
    """Of the parts, of the newest machines, and of the newest workers."""
    machines = _newest(home.path.glob("instances/*/instance.log"))
    workers = _newest(log for logs in _ray_logs(state) for log in logs.glob("worker-*.err"))
    return [*sorted(home.logs.glob("*.log")), *machines, *workers]


def _newest(logs: Iterable[Path]) -> list[Path]:
    times = {}
    for log in logs:
        with contextlib.suppress(OSError):
            times[log] = log.stat().st_mtime
    return sorted(times, key=times.__getitem__)[-NEWEST:]


def _ray_logs(state: StackState) -> list[Path]:
    # beside each session there is a link to the latest
    with contextlib.suppress(OSError):
        return sorted(Path(state.scratch).glob("*/session_2*/logs")) if state.scratch else []
    return []


def _title(log: Path) -> str:
    return log.parent.name if log.name == "instance.log" else log.stem
