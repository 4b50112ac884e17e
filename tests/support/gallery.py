"""Jobs of all kinds for the pages, written as the other processes write them."""

from __future__ import annotations

import math
import time
from typing import Any

from support.api_harness import Api
from support.lines import printed
from vcasgd.schemas.costs import Offer
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


def with_fleet(api: Api, job: str) -> None:
    """Give the stack machines, one of which works for a job, and a pool that refuses launches."""
    now = time.time()
    offer = Offer(
        pool="spot", zone="eu-1a", machine_type="g5.xlarge", spot=True, price_per_hour=0.3,
        on_demand_price_per_hour=1.0, cpus=4.0, gpus=1, as_of=now, source="test",
    ).model_dump()  # fmt: skip
    fields = {name: _MACHINE[name] for name in ("pool", "zone", "machine_type", "spot")}
    machine = {**fields, "state": "running", "joined": True, "launched_at": now - 300,
               "price_per_hour": 0.3, "job": job}  # fmt: skip
    pools: dict[str, dict[str, Any]] = {
        "spot": {"position": 0, "provider": "aws", "machines": 2, "capacity": 8, "spot": True,
                 "launches": 3, "offers": [offer]},
        "lab": {"position": 1, "provider": "join", "blocked_until": now + 600,
                "reason": "no machine has joined"},
    }  # fmt: skip
    machines = {f"i-0123456789abcde{number}": machine for number in range(2)}
    api.control.publish(machines, pools)
    for name in machines:
        beat = {"at": now, "machine": name, "doing": "training subtask 1025", "samples": 25_193,
                "samples_per_second": 224.7, "pushed_bytes": 32_100_000}  # fmt: skip
        api.leases(job, f"{job}.{name}").renew(beat, [])
    server = {"memory_used_bytes": 3_300_000, "memory_limit_bytes": 6_400_000_000,
              "operations_per_second": 1376, "publications_per_second": 7.9,
              "queued": {job: 1}, "versions": {job: 3845}, "publications": {job: 1059}}  # fmt: skip
    api.servers.beat("node-0", server)


def with_logs(api: Api, job: str) -> None:
    """Give a job lines of all levels from two workers."""
    api.jobs.add_logs(job, f"{job}.i-stays", printed(f"step {each}" for each in range(40)))
    api.jobs.add_logs(job, f"{job}.i-newer", printed(["train: 3 workers"], "info"))
    api.jobs.add_logs(job, f"{job}.i-newer", printed(["train.py:7: UserWarning: slow"], "warning"))
    api.jobs.add_logs(job, f"{job}.i-newer", printed(["100%|#####| 40/40"], "err"))
    trace = ["Traceback (most recent call last):", "ValueError: no such column"]
    api.jobs.add_logs(job, f"{job}.i-newer", printed(trace, "error"))


def ended(api: Api, **fields: Any) -> str:
    job = api.submit(**fields)
    api.finish(job, JobState.CANCELLED, ended_at=time.time())
    return job
