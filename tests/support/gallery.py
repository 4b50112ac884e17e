"""Jobs of all kinds for the pages, written as the other processes write them."""

from __future__ import annotations

import math
import time
from typing import Any

from support.api_harness import Api
from support.lines import printed
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.events import EventLog
from vcasgd.store.ledger.job import JobState

LONG_NAME = "a-job-with-the-longest-name-that-a-job-file-can-have-0123456789"
_MACHINE = {
    "pool": "spot", "zone": "eu-1a", "machine_type": "g5.xlarge", "spot": True,
    "price_per_hour": 0.3, "replaced_by": None, "reason": None, "lost": False, "given_to": None,
}  # fmt: skip


def trained(
    api: Api,
    metrics: dict[str, float],
    *,
    epochs: int = 10,
    logged: tuple[str, ...] = (),
    **fields: Any,
) -> str:
    """Return a running job with a point of its history each second, and an evaluation of each
    epoch. ``logged``: names under which its steps log."""
    job = api.submit(epochs=epochs, subtasks_per_epoch=4, **fields)
    start = time.time() - 10 * epochs
    api.connection.hset(LedgerKeys(job).record, "created_at", start)
    api.start_job(job, samples=1000)
    for second in range(10 * epochs):
        noise = 0.2 * math.sin(second * 2.4)
        point = {"at": start + second, "samples": 100 * second, "loss": 2.3 / (1 + second / 30),
                 "updates_per_second": 18 + 9 * noise, "staleness_mean": 1 + noise, "workers": 3,
                 "spent_usd": second * 1e-4,
                 "logged": dict.fromkeys(logged, 1 + noise) or None}  # fmt: skip
        api.jobs.add_metrics(job, point)
    for epoch in range(1, epochs):
        better = 1 - 0.5 / epoch + 0.02 * math.sin(3 * epoch)
        values = {
            name: best / better if name in ("loss", "perplexity") else best * better
            for name, best in metrics.items()
        }
        api.evaluate(job, epoch, values, at=start + 10 * epoch)
    return job


def lane(start: float, *spans: tuple[str, float, float | None], **fields: Any) -> dict[str, Any]:
    """Return the timeline of a machine; times are seconds after ``start``."""
    rows = [
        {"state": state, "from": start + since, "to": None if until is None else start + until}
        for state, since, until in spans
    ]
    return {**_MACHINE, **fields, "spans": rows}


def with_machines(api: Api, job: str) -> None:
    """Give a job a machine of each fate: one that came from another job and went to a third."""
    at = api.jobs.get(job).created_at
    lanes = {
        "i-evicted": lane(at, ("booting", 1, 5), ("running", 5, 40), ("notice", 40, 50),
                          ("dead", 50, None), lost=True, reason="evicted", replaced_by="i-newer"),
        "i-killed": lane(at, ("booting", 1, 6), ("running", 6, 30), ("dead", 30, None), lost=True,
                         reason="lost without a notice"),
        "i-given": lane(at, ("running", -300, 20), given_to="other-abc123"),
        "i-newer": lane(at, ("booting", 42, 52), ("running", 52, None)),
        "i-stays": lane(at, ("booting", 1, 5), ("running", 5, None)),
    }  # fmt: skip
    EventLog(api.connection).update_timelines({job: lanes})


def with_logs(api: Api, job: str) -> None:
    """Give a job lines of all levels from two workers."""
    api.jobs.add_logs(job, f"{job}.i-stays", printed(f"step {each}" for each in range(40)))
    api.jobs.add_logs(job, f"{job}.i-newer", printed(["train: 3 workers"], "info"))
    api.jobs.add_logs(job, f"{job}.i-newer", printed(["train.py:7: UserWarning: slow"], "warning"))
    api.jobs.add_logs(job, f"{job}.i-newer", printed(["100%|#####| 40/40"], "err"))
    trace = ["Traceback (most recent call last):", "ValueError: no such column"]
    api.jobs.add_logs(job, f"{job}.i-newer", printed(trace, "error"))


def ended(api: Api, **fields: Any) -> str:
    """Return a job that was cancelled at once."""
    job = api.submit(**fields)
    api.finish(job, JobState.CANCELLED, ended_at=time.time())
    return job
