"""Names of workers: each consists of a job, a machine, and a learner's number on that machine."""

from __future__ import annotations


def worker_name(machine_id: str, job: str, learner: int = 1) -> str:
    """Return the name of a job's worker on one machine; unique while the machine exists.

    ``learner``: 1, 2, … The separators are safe: no job has a dot in its id, and no cloud has an
    underscore in the id of a machine.
    """
    return f"{job}.{machine_id}" if learner == 1 else f"{job}.{machine_id}_{learner}"


def job_of(worker: str) -> str:
    """Return the job in a worker's name."""
    return worker.partition(".")[0]


def machine_of(worker: str) -> str:
    """Return the machine id in a worker's name."""
    return worker.partition(".")[2].partition("_")[0]


def learner_of(worker: str) -> int:
    """Return the learner's number; 1 for the first one of a machine and for any other name."""
    number = worker.partition(".")[2].partition("_")[2]
    return int(number) if number.isdecimal() else 1
