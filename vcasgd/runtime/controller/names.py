"""A worker's name says its job and its machine."""

from __future__ import annotations


def worker_name(instance_id: str, job: str) -> str:
    """One worker of a job on one machine; unique while the machine lives."""
    return f"{job}.{instance_id}"


def job_of(worker: str) -> str:
    return worker.partition(".")[0]


def instance_of(worker: str) -> str:
    return worker.partition(".")[2]
