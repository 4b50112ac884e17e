"""What runs on a worker's machine: a worker that hears the cloud's notices."""

from __future__ import annotations

from vcasgd.fleet.machine.notices import notices_from_environment
from vcasgd.logging import configure_logging, identify
from vcasgd.settings import load_settings
from vcasgd.worker.loop import Worker

#: what a Ray actor is told to run
ENTRY = "vcasgd.worker.main:run"


def run(job: str, worker: str, instance: str) -> None:
    """Until the job is over or the machine has to go. Settings come from the environment."""
    configure_logging("worker")
    identify(job=job, worker=worker)
    settings = load_settings()
    notices = notices_from_environment(settings.metadata)
    Worker(settings, job, worker, instance=instance, notices=notices).run()
