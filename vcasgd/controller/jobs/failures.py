"""Failures of a job's workers: which still count, and how many are too many. No I/O."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vcasgd.store.ledger.job import PROCESS, Failure

#: Failures of one work item after which the job fails, on as many machines if there are so many.
ATTEMPTS = 3
#: Part of a job's workers that have to fail without work in common, and the most of them.
SHARE_OF_WORKERS, MOST_FAILURES = 0.1, 100
#: Seconds after which a failure no longer counts.
FAILURE_SECONDS = 3600.0
#: Failures of a worker that no work item causes, such as a full disk.
OWN_PIECES = (PROCESS, "prepare")


def still_counting(failures: Iterable[Failure], now: float, version: int) -> list[Failure]:
    """Return the failures that have not expired; ``now`` is the time of the ledger.

    A failure expires with time. One without a work item also expires with
    progress, that is as soon as the model has a newer ``version``: the job trains nevertheless.
    """
    return [
        each
        for each in failures
        if each.fatal
        or (
            now - each.at < FAILURE_SECONDS
            and (each.piece not in OWN_PIECES or each.version >= version)
        )
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
    return min(MOST_FAILURES, max(ATTEMPTS, math.ceil(SHARE_OF_WORKERS * workers)))
