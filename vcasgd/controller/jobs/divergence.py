"""Divergence of one job, and owners whose work was wrong: what training goes back to. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from vcasgd.controller.jobs.failures import repeated
from vcasgd.learning.divergence import MAX_DIVERGENCES, divergences
from vcasgd.store.ledger.job import Evaluation, Failure, JobRecord
from vcasgd.store.ledger.placement import Suspect

#: Remedy in the reason of a job that diverged.
REMEDY = "lower the learning rate or clip gradients (clip_norm of the task)"


def diverged(job: JobRecord, failures: Sequence[Failure], workers: int) -> str | None:
    """Return how training diverged since its last rollback, or None if it didn't.

    An evaluation shows it (:func:`~vcasgd.learning.divergence.divergences`), or workers fail at
    the same work item because a loss or a parameter is not finite. ``workers`` is their number.
    """
    shown = _shown(job)
    for each in reversed(job.evaluations):
        if each.number in shown and each.rollbacks >= job.tuned.rollbacks:
            return f"{shown[each.number]} in {each.place}"
    failure = repeated([each for each in failures if _is_current(each, job)], workers)
    return failure.message if failure else None


def models_before(job: JobRecord) -> list[Evaluation]:
    """Return the evaluations that don't show divergence, the best first.

    Of equally good ones, and if no metric ranks them, a newer one comes first.
    """
    metric, shown = job.metric, _shown(job)

    def rank(each: Evaluation) -> tuple[float, int]:
        quality = metric.quality(each.metrics) if metric else 0.0
        return (-inf if quality is None else quality), each.number

    return sorted(
        (each for each in job.evaluations if each.number not in shown), key=rank, reverse=True
    )


def hopeless(job: JobRecord, how: str, models: Sequence[Evaluation]) -> str | None:
    """Return why the job fails instead of going back again, or None.

    ``models`` are those of :func:`models_before`.
    """
    if not models:
        return f"{how}; training diverged before its first usable evaluation; {REMEDY}"
    # A worker reported the evaluation's number.
    times = max(job.tuned.divergences - models[0].rollbacks, 0) + 1
    if times < MAX_DIVERGENCES:
        return None
    rate = job.tuned.learning_rate
    return (
        f"{how}; training diverged {times} times since its best model, of {models[0].place}, to "
        f"which it went back, at last with {rate:.0%} of the learning rate; {REMEDY}"
    )


def suspect_to_undo(job: JobRecord) -> tuple[str, Suspect] | None:
    """Return an owner of which updates were applied that may be wrong; None if all are undone."""
    for owner, suspect in sorted(job.tuned.suspects.items()):
        if suspect.version is not None and owner not in job.tuned.undone:
            return owner, suspect
    return None


def checkpoint_before(suspect: Suspect, listed: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the newest checkpoint without updates that may be wrong, else the oldest one.

    ``listed`` are descriptions by name. Returns None if there is no checkpoint.
    """
    versions = {name: each["versions"][suspect.shard] for name, each in listed.items()}
    if not versions:
        return None
    clean = {name: each for name, each in versions.items() if each <= (suspect.version or 0)}
    if clean:
        return max(clean, key=lambda name: clean[name])
    return min(versions, key=lambda name: versions[name])


def _shown(job: JobRecord) -> dict[int, str]:
    """Return the numbers of the evaluations that show divergence, each with how."""
    found = divergences(job.evaluations, job.metric.name if job.metric else None)
    pairs = zip(job.evaluations, found, strict=True)
    return {each.number: how for each, how in pairs if how is not None}


def _is_current(failure: Failure, job: JobRecord) -> bool:
    return failure.diverged and failure.rollbacks >= job.tuned.rollbacks
