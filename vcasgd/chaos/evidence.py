"""Evidence of a failed audit: state of the stack, and the ends of all logs."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vcasgd.errors import VcasgdError
from vcasgd.logging import last_lines
from vcasgd.stack import StackHome, StackState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.untrusted import Heartbeat

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
    evidence |= {f"{_title(log)} log": last_lines(log, LOG_LINES) for log in _logs(home, state)}
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
    """Yield the evidence as lines of text."""
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
    shown = {name: each for name, each in beat.to_json().items() if name != "at"}
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


def _title(log: Path) -> str:
    return log.parent.name if log.name == "machine.log" else log.stem
