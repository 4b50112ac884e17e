"""Failures of a job: of its workers, by divergence, or by wrong work. No I/O.

They decide which failures still count, how many are too many, and which model training goes back
to. The reactions to each kind of fault are in :mod:`vcasgd.errors`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vcasgd.errors import Cause
from vcasgd.learning.divergence import MAX_DIVERGENCES, divergences
from vcasgd.store.ledger.job import PREPARE, PROCESS, Evaluation, Failure, JobRecord
from vcasgd.store.ledger.placement import Suspect
from vcasgd.worker_names import machine_of

#: Failures of one work item after which the job fails, on as many machines if there are so many.
ATTEMPTS = 3
#: Part of a job's workers that have to fail without work in common, and the most of them.
SHARE_OF_WORKERS, MAX_FAILURES = 0.1, 100
#: Seconds after which a failure no longer counts.
FAILURE_SECONDS = 3600.0
#: Failures of a worker that no work item causes, such as a full disk.
OWN_PIECES = (PROCESS, PREPARE)
#: Seconds after which a machine is to blame that still can't prepare a job that others train. What
#: it needs to fetch, such as packages, may be unavailable for some minutes.
PREPARE_SECONDS = 600.0
#: Seconds after which a job fails if all of its machines are at fault. The next one may be better.
ALONE_SECONDS = 600.0
#: Remedy in the reason of a job that diverged.
REMEDY = "lower the learning rate or clip gradients (clip_norm of the task)"


def recent(failures: Iterable[Failure], now: float) -> list[Failure]:
    """Return the failures that have not expired at ``now``, the time of the ledger."""
    return [each for each in failures if each.fault is Cause.JOB or now - each.at < FAILURE_SECONDS]


def still_counting(failures: Iterable[Failure], version: int) -> list[Failure]:
    """Return the failures that count against the job.

    One without a work item expires as soon as the model has a newer ``version``: the job trains
    nevertheless.
    """
    return [
        each
        for each in failures
        if each.fault is Cause.JOB or each.piece not in OWN_PIECES or each.version >= version
    ]


def repeated(failures: Sequence[Failure], workers: int) -> Failure | None:
    """Return the last of too many failures, or None.

    A work item fails too often after :data:`ATTEMPTS`, on as many machines if there are so many.
    Of failures without a work item, a part of the job's ``workers`` is too many.
    """
    of_all = min(MAX_FAILURES, max(ATTEMPTS, math.ceil(SHARE_OF_WORKERS * workers)))
    by_item: dict[str, list[Failure]] = defaultdict(list)
    for failure in failures:
        by_item[failure.piece].append(failure)
    for piece, same in by_item.items():
        machines = {failure.worker for failure in same}
        most = of_all if piece in OWN_PIECES else ATTEMPTS
        if len(same) >= most and len(machines) >= min(ATTEMPTS, max(1, workers)):
            return same[-1]
    return None


def at_fault(failures: Iterable[Failure], *, prepared: bool) -> dict[str, Failure]:
    """Return the workers whose machines are to blame, each with its last failure.

    ``prepared``: another machine could prepare the job.
    """
    blamed: dict[str, Failure] = {}
    first: dict[str, Failure] = {}
    for each in failures:
        tries = prepared and each.piece == PREPARE
        lasting = tries and each.at - first.setdefault(each.worker, each).at >= PREPARE_SECONDS
        if each.fault is Cause.MACHINE or lasting:
            blamed[each.worker] = each
    return blamed


def none_agree(
    blamed: Mapping[str, Failure], workers: Collection[str], lost: int, now: float
) -> str | None:
    """Return why a job fails whose machines are at fault, or None.

    ``blamed`` are those of :func:`at_fault`, ``workers`` all of the job's workers, and ``lost`` the
    machines that it has lost. At least :data:`ATTEMPTS` machines, and more than all others, are too
    many: the first machine is wrong, or each new one is. With only a few machines, their
    replacements have :data:`ALONE_SECONDS`.
    """
    if not blamed:
        return None
    machines = set(map(machine_of, blamed))
    others = lost + len(set(map(machine_of, workers)) - machines)
    alone = not others and now - min(each.at for each in blamed.values()) >= ALONE_SECONDS
    if not alone and (len(machines) < ATTEMPTS or len(machines) <= others):
        return None
    last = max(blamed.values(), key=lambda each: each.at)
    count = len(machines)
    return f"{count} of the job's machines are at fault, {others} are not; the last: {last.message}"


def too_many_bad(job: JobRecord) -> str | None:
    """Return why a job fails that has skipped more samples than it may, or None."""
    skipped = job.totals.get("skipped", 0)
    if not skipped or job.plan is None:
        return None
    most = job.spec.most_bad_samples(job.plan.total_samples)
    if skipped <= most:
        return None
    return (
        f"{skipped} samples were skipped because they are bad, more than the {most} of "
        f"max_bad_samples ({job.spec.max_bad_samples:g}); events of the kind bad-sample name them"
    )


# -- divergence and wrong work ---------------------------------------------------------------------


def diverged(job: JobRecord, failures: Sequence[Failure], workers: int) -> str | None:
    """Return how training diverged since its last rollback, or None if it didn't.

    An evaluation shows it (:func:`~vcasgd.learning.divergence.divergences`), or workers fail at
    the same work item because a loss or a parameter is not finite. ``workers`` is their number.
    """
    shown = _shown(job)
    for each in reversed(job.evaluations):
        if each.number in shown and each.rollbacks >= job.tuned.rollbacks:
            return f"{shown[each.number]} in {each.place}"
    rollbacks = job.tuned.rollbacks
    current = [each for each in failures if each.diverged and each.rollbacks >= rollbacks]
    failure = repeated(current, workers)
    return failure.message if failure else None


def models_before(job: JobRecord) -> list[Evaluation]:
    """Return the evaluations that don't show divergence, the best first.

    Of equally good ones, and if no metric ranks them, a newer one comes first.
    """
    metric, shown = job.metric, _shown(job)

    def rank(each: Evaluation) -> tuple[float, int]:
        quality = metric.quality(each.metrics) if metric else 0.0
        return (-math.inf if quality is None else quality), each.number

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
