"""Exports of jobs with ``track``: a process of ``vcasgd track --follow`` for each job and tracker.

The libraries of trackers run in these processes only, and with nothing but a token that can read:
one that hangs, fails, or leaks affects its own export. It continues at its stored position.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from vcasgd.backoff import backoff
from vcasgd.child_process import kill, visible
from vcasgd.controller.leadership import LeaderThread
from vcasgd.errors import Conflict, NotFound, SpecError
from vcasgd.printable import hide, masked
from vcasgd.settings import Settings
from vcasgd.spec.access import TRACKERS, Scope
from vcasgd.spec.sections import Track
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

#: Seconds between two looks at all jobs and processes.
LOOK_SECONDS = 2.0
#: Newest jobs whose exports continue after their end, beside those that ended within a day.
NEWEST_JOBS = 100
#: Most processes at a time; each takes about 100 MB, with the library of its tracker.
MAX_PROCESSES = 16
#: Pause after a failure, which doubles up to the longest one, in seconds.
FIRST_PAUSE, MAX_PAUSE = 5.0, 600.0
#: Seconds after which a process that fails starts a new series of failures.
HEALTHY_SECONDS = 60.0
#: Seconds for all processes to end.
STOP_SECONDS = 5.0
#: Variables of the controller that reach a tracker, besides those that each program needs.
_INHERITED = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("REQUESTS_CA_BUNDLE", "TMPDIR"),
)
#: Bytes of the output that are searched for an error, and most characters of the error.
OUTPUT_BYTES, MAX_ERROR_LENGTH = 4096, 500


@dataclass
class _Export:
    """Export of a job to a tracker. ``process`` is None between two attempts."""

    job: str
    track: Track
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    next_at: float = field(default_factory=time.monotonic)


class TrackerExports(LeaderThread):
    """Thread that keeps the exports of all jobs running while this controller is the leader."""

    def __init__(self, settings: Settings, ledger: RedisClient, leads: Callable[[], bool]) -> None:
        super().__init__("trackers", leads, LOOK_SECONDS)
        self._settings = settings
        self._jobs, self._tokens = Jobs(ledger), ApiTokens(ledger)
        #: Exports of each known job that are not complete.
        self._exports: dict[str, list[_Export]] = {}
        self._token: str | None = None

    def work(self) -> None:
        """Look after the exports until :meth:`stop`, and end all processes."""
        super().work()
        self._end_all()

    def stop(self) -> None:
        """End :meth:`work`, and wait for it."""
        super().stop()
        self.join(STOP_SECONDS)

    def look(self) -> None:
        """Start what is due, and take the result of what has ended."""
        if not self._leads():
            self._end_all()
            return
        present = {*self._jobs.active_since(0.0), *self._jobs.newest(NEWEST_JOBS)}
        for job in self._exports.keys() - present:
            for export in self._exports.pop(job):
                _end(export)
        for job, record in self._jobs.get_many(present - self._exports.keys()).items():
            done = self._jobs.exported(job) if record.spec.track else set()
            tracks = [each for each in record.spec.track if each.to not in done]
            self._exports[job] = [_Export(job, each) for each in tracks]
        for export in self._all():
            self._reap(export)
        exports = self._all()
        running = sum(each.process is not None for each in exports)
        now = time.monotonic()
        due = [each for each in exports if each.process is None and now >= each.next_at]
        for export in due[: MAX_PROCESSES - running]:
            try:
                self._start(export)
            except (SpecError, Conflict, OSError) as error:
                self._fail(export, f"{error}", ran=0.0)

    # -- processes -----------------------------------------------------------------------------

    def _start(self, export: _Export) -> None:
        folder = self._settings.home_path / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "vcasgd.cli", "track", export.job, "--to", export.track.to]
        argv += ["--follow", "--folder", str(folder), "--project", export.track.project]
        environment = self._environment()
        output = TemporaryFile()  # noqa: SIM115 - closed with its process
        export.output, export.started = output, time.monotonic()
        export.process = subprocess.Popen(
            argv,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def _environment(self) -> dict[str, str]:
        """Return the environment of a process: the settings of the trackers, and none of ours.

        Raises :class:`SpecError`.
        """
        inherited = visible(os.environ, _INHERITED)
        # The supervisor finds processes that a killed controller has left by the marker.
        marker = os.environ.get("VCASGD_MACHINE_ID")
        if marker is not None:
            inherited["VCASGD_MACHINE_ID"] = marker
        file = self._settings.tracker_env
        own = read_variables(file) if file else {}
        hide(own.values())
        api = {"VCASGD_API_URL": self._settings.api_url, "VCASGD_TOKEN": self._read_token()}
        # A wide terminal, so that errors have one line.
        return {**inherited, "COLUMNS": "1000", **own, **api}

    def _read_token(self) -> str:
        """Return a token that can only read; a new one if it was revoked."""
        known = self._tokens.all().get(TRACKERS)
        if self._token is None or known is None or not known.opened_by(self._token):
            with suppress(NotFound):
                self._tokens.revoke(TRACKERS)
            _, self._token = self._tokens.create(TRACKERS, Scope.READ)
        return self._token

    def _reap(self, export: _Export) -> None:
        if export.process is None or (status := export.process.poll()) is None:
            return
        problem = _error(export)
        ran = time.monotonic() - export.started
        _end(export)
        if status == 0:
            # It follows the job, so the job has ended and everything is exported.
            self._jobs.set_exported(export.job, export.track.to)
            self._exports[export.job].remove(export)
            return
        self._fail(export, problem or f"status {status}", ran)

    def _fail(self, export: _Export, problem: str, ran: float) -> None:
        """Let an export pause after a process that failed, after ``ran`` seconds."""
        export.failures = 1 if ran > HEALTHY_SECONDS else export.failures + 1
        pause = backoff(export.failures, FIRST_PAUSE, MAX_PAUSE)
        export.next_at = time.monotonic() + pause
        text = f"the export to {export.track.to} failed: {problem}"
        log.warning("%s: %s", export.job, text)
        # The first failure of a series can be that of a restarted API.
        if export.failures == 2:
            self._jobs.event(
                export.job, "tracker-failed", f"{text}; it is retried", tracker=export.track.to
            )

    def _end_all(self) -> None:
        for export in self._all():
            _end(export)
        self._exports.clear()

    def _all(self) -> list[_Export]:
        return [each for exports in self._exports.values() for each in exports]


def _error(export: _Export) -> str:
    """Return the error at the end of a process's output, without hidden values."""
    assert export.output is not None, "it was started"
    size = export.output.seek(0, os.SEEK_END)
    export.output.seek(max(0, size - OUTPUT_BYTES))
    text = export.output.read().decode(errors="replace")
    # Of a traceback, the last line says what happened.
    _, found, error = text.rpartition("error: ")
    lines = (error if found else text.strip().rpartition("\n")[2]).split("\n")
    return masked("; ".join(line.strip() for line in lines if line.strip()))[:MAX_ERROR_LENGTH]


def _end(export: _Export) -> None:
    """End a process, at any point: the next one continues at the stored position."""
    process, output = export.process, export.output
    export.process = export.output = None
    if process is not None:
        kill(process)
    if output is not None:
        output.close()


def read_variables(file: Path) -> dict[str, str]:
    """Return the variables of a file with ``NAME=value`` lines, and comments with ``#``.

    Raises :class:`SpecError`, without the values.
    """
    try:
        lines = file.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"VCASGD_TRACKER_ENV: {error}", field="VCASGD_TRACKER_ENV") from error
    variables = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise SpecError(
                f"VCASGD_TRACKER_ENV: line {number} of {file} is not of the form NAME=value",
                field="VCASGD_TRACKER_ENV",
            )
        variables[name.strip()] = value.strip()
    return variables
