"""A worker's name says its job and its machine, and which of the machine's learners it is."""

from __future__ import annotations


def worker_name(instance_id: str, job: str, learner: int = 1) -> str:
    """A worker of a job on one machine; unique while the machine lives. ``learner``: 1, 2, …

    No cloud has an underscore in the id of a machine.
    """
    return f"{job}.{instance_id}" if learner == 1 else f"{job}.{instance_id}_{learner}"


def job_of(worker: str) -> str:
    return worker.partition(".")[0]


def instance_of(worker: str) -> str:
    return worker.partition(".")[2].partition("_")[0]


def learner_of(worker: str) -> int:
    """1 for the first of its machine, and for a name that nobody gave."""
    number = worker.partition(".")[2].partition("_")[2]
    return int(number) if number.isdecimal() else 1
