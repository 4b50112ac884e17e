"""Following jobs on the command line, against a real API."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from support.api_harness import Api
from support.command_line import Run, stdout_of
from support.waiting import PATIENCE, await_truth

from vcasgd.cli.follow import follow as show_progress
from vcasgd.cli.follow import statuses
from vcasgd.store.ledger.job import JobState


def after(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def test_follow_ends_with_the_job(run: Run, api: Api) -> None:
    job = api.submit()
    api.start_job(job)
    timer = after(0.7, lambda: api.finish(job))

    text = stdout_of(run("follow", job))

    timer.join()
    assert "job-running: started" in text
    assert "job-succeeded: it succeeded" in text
    assert f"{job} succeeded after" in text.splitlines()[-1]


def test_every_command_counts_the_time_of_a_job_from_its_start(run: Run, api: Api) -> None:
    job = api.submit()
    created = api.jobs.get(job).created_at
    api.jobs.transition(
        job, JobState.RUNNING, [JobState.STARTING], why="started", started_at=created + 600
    )
    api.finish(job, ended_at=created + 690)

    assert "\ntook        90 s\n" in stdout_of(run("show", job))
    assert " succeeded after 90 s, " in stdout_of(run("follow", job))
    assert " 90 s " in stdout_of(run("compare", job))


def test_follow_prints_the_reason_and_traceback_of_a_failed_job(run: Run, api: Api) -> None:
    job = api.submit()
    trace = 'Traceback (most recent call last):\n  File "train.py", line 1\nValueError: [red]'
    api.finish(job, JobState.FAILED, traceback=trace)

    result = run("follow", job)

    assert result.exit_code == 1
    assert f"error: job {job} has failed: it failed" in result.stderr
    assert trace in result.stderr
    assert trace in run("show", job).stderr


def test_submit_with_follow_exits_with_the_result_and_prints_only_json(
    run: Run, api: Api, job_file: Path
) -> None:
    timer = after(0.0, lambda: api.finish(await_truth(api.jobs.active)[0], JobState.CANCELLED))
    result = run("submit", job_file, "--follow", "--json")
    timer.join()
    assert result.exit_code == 1
    job = json.loads(result.stdout)["id"]
    assert f"job {job} is cancelled: it cancelled" in result.stderr


def test_ctrl_c_stops_following_but_not_the_job(api: Api) -> None:
    job = api.submit()
    api.start_job(job)
    command = [sys.executable, "-m", "vcasgd.cli", "follow", job]
    with subprocess.Popen(
        command,
        env={**os.environ, **api.env, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of a shell ignore SIGINT, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while "job-running" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"job {job} keeps running; follow it again with: vcasgd follow {job}" in stderr
    assert "Traceback" not in stderr
    assert api.jobs.get(job).state == "running"


def test_a_terminal_shows_figures_below_the_events_and_no_silent_workers(api: Api) -> None:
    job = api.submit()
    api.start_job(job)
    now = time.time()
    api.leases(job, "old").renew({"at": now - 60, "machine": "i-1"}, [])
    api.leases(job, "new").renew({"at": now, "machine": "i-2"}, [])
    api.account(job, 4, 1, updates=4, applied=100, staleness_mean=1.5, staleness_max=3)
    console = Console(file=io.StringIO(), force_terminal=True, width=160)

    with api.client() as client:
        found = statuses(client, job)
        first = next(found)
        api.finish(job)
        view = show_progress(itertools.chain([first], found), console)

    assert view.state == "succeeded"
    text = console.file.getvalue()
    for word in ("epoch 2/2 (50%)", "staleness 1.5", "workers 1", "job-running", "job-succeeded"):
        assert word in text


def test_follow_says_why_a_job_is_queued(api: Api) -> None:
    job = api.submit()
    why = "position 1 of 1: waits for 1 of 1 machines; cloud: no permission"
    place = {"text": why, "position": 1, "length": 1, "has_machines": False}
    api.jobs.set_waiting({job: place})
    with api.client() as client:
        assert f"queued: {why}" in str(next(statuses(client, job)))


def test_follow_says_that_machines_boot_until_a_worker_starts(api: Api) -> None:
    job = api.submit()
    api.jobs.set_waiting({job: {"text": "2 machines are booting"}})
    with api.client() as client:
        assert "starting: 2 machines are booting" in str(next(statuses(client, job)))
        api.leases(job).renew({"at": time.time(), "machine": "i-1", "doing": "starting"}, [])
        assert "booting" not in str(next(statuses(client, job)))


def test_a_full_disk_behind_a_redirection_is_named(api: Api) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vcasgd.cli", "jobs", "--json", "--url", api.url],
            env=os.environ | {"VCASGD_TOKEN": api.token},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
    assert (done.stderr, done.returncode) == ("error: No space left on device\n", 1)
