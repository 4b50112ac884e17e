"""A real job on this machine: servers, parameter server, and worker processes."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from columns import Run, job_fields, job_spec, task_args
from processes import TRAINING_SECONDS, logs, start, wait_until
from pydantic import SecretStr

from vcasgd.controller.jobs.loop import JobLoop
from vcasgd.controller.leadership import Leadership
from vcasgd.settings import Settings
from vcasgd.stack import StackHome, running
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import connect
from vcasgd.store.embedded import ServerFiles
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.task.package import digest_of, pack

#: Parts of a stack that exchange updates.
PARTS = ("ledger", "tensors", "server")
#: Seconds for worker processes to import torch on a busy machine.
READY_SECONDS = 120.0
#: Workers check their leases this often.
HEARTBEAT = 1.0
PACKAGE_BYTES = 10_000_000


def asynchronous(options: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Train a real job on defaults."""
    with tempfile.TemporaryDirectory(prefix="vcasgd-") as folder:
        settings = Settings(
            home=Path(folder) / "home",
            storage_url=f"file://{folder}/storage",
            heartbeat=HEARTBEAT,
            job_users=False,
        )
        with running(settings, names=PARTS) as state:
            home = StackHome(settings.home)
            urls = {
                f"{name}_url": SecretStr(
                    ServerFiles(home.path / name, state.ports[name], home.ensure_password(name)).url
                )
                for name in ("ledger", "tensors")
            }
            return _train_job(options, workers, settings.model_copy(update=urls), Path(folder))


def _train_job(
    options: argparse.Namespace, workers: int, settings: Settings, folder: Path
) -> dict[str, Any]:
    ledger = connect(settings.required("ledger_url"))
    jobs = Jobs(ledger)
    job = _submit(options, workers, settings, jobs)
    environment = {
        "VCASGD_LEDGER_URL": settings.required("ledger_url"),
        "VCASGD_TENSORS_URL": settings.required("tensors_url"),
        "VCASGD_STORAGE_URL": settings.required("storage_url"),
        "VCASGD_CACHE_DIR": str(folder / "cache"),
        "VCASGD_HEARTBEAT": str(HEARTBEAT),
    }
    processes = [
        start(
            ["-m", "vcasgd.worker.main", "--job", job, "--worker", f"worker-{nth}"],
            folder / f"{nth}.log",
            environment,
        )
        for nth in range(workers)
    ]
    leadership = Leadership(Control(ledger), settings)
    nodes = [connect(settings.required("tensors_url"))]
    loop = JobLoop(settings, ledger, nodes, leadership, WorkerBeats(ledger))
    try:
        wait_until(
            lambda: jobs.workers.count(job) == workers and jobs.get(job).facts is not None,
            READY_SECONDS,
        )
        leadership.start()
        loop.start()
        wait_until(lambda: jobs.get(job).state.over, TRAINING_SECONDS)
        loop.stop(checkpoint=False)
        return _outcome(jobs.get(job), folder)
    finally:
        leadership.stop()
        for process in processes:
            process.terminate()
        wait_until(lambda: all(each.poll() is not None for each in processes), READY_SECONDS)


def _submit(options: argparse.Namespace, workers: int, settings: Settings, jobs: Jobs) -> str:
    fields = job_fields(options.task)
    run = Run(options.task, f"workers-{workers}", options.seed)
    spec = job_spec(run, {**fields, "args": task_args(fields, options.data)})
    package = pack(Path(spec.working_dir), PACKAGE_BYTES)
    Storage(settings.required("storage_url")).put(f"packages/{digest_of(package)}.zip", package)
    return jobs.submit(spec, digest_of(package)).id


def _outcome(record: JobRecord, folder: Path) -> dict[str, Any]:
    if record.state is not JobState.SUCCEEDED:
        raise SystemExit(f"{record.id} {record.state}: {record.reason}\n{logs(folder)}")
    assert record.started_at is not None
    points = [
        {
            "epoch": each.epoch,
            "seconds": round(each.at - record.started_at, 3),
            "metrics": each.metrics,
        }
        for each in record.evaluations
    ]
    totals = record.totals
    return {
        "points": points,
        "updates": totals["updates"],
        "staleness_mean": totals["staleness_mean"],
        "staleness": totals["staleness"],
    }
