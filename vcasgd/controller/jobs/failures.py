"""Failures of a job's workers: which still count, and how many are too many. No I/O.

The reactions to each kind of fault are in :mod:`vcasgd.errors`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from vcasgd.errors import Cause
from vcasgd.store.ledger.job import PREPARE, PROCESS, Failure
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
    by_item: dict[str, list[Failure]] = defaultdict(list)
    for failure in failures:
        by_item[failure.piece].append(failure)
    for piece, same in by_item.items():
        machines = {failure.worker for failure in same}
        most = _most(workers) if piece in OWN_PIECES else ATTEMPTS
        if len(same) >= most and len(machines) >= min(ATTEMPTS, max(1, workers)):
            return same[-1]
    return None


def _most(workers: int) -> int:
    return min(MAX_FAILURES, max(ATTEMPTS, math.ceil(SHARE_OF_WORKERS * workers)))


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
