"""Estimate of a job's traffic with the store, and of the part that clouds charge for.

The store is in one zone. Between zones of a region, clouds charge for each GB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vcasgd.schemas.costs import OfferView, TrafficEstimateView
from vcasgd.spec.job import JobSpec

#: USD per GB between two zones, by provider. AWS charges 0.01 for each side
#: (https://aws.amazon.com/ec2/pricing/on-demand/), Google 0.01 for the sender
#: (https://cloud.google.com/vpc/pricing). These pages have the prices of today.
USD_PER_GB = {"aws": 0.02, "gcp": 0.01}
#: Bytes per number of a payload. Sparse encodings have at most those of ``int8``.
BYTES_PER_NUMBER = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int2": 0.34, "topk": 1.0}
GIGABYTE = 1e9


def bytes_per_sample(
    spec: JobSpec,
    *,
    parameters: int | None,
    measured: float | None,
    samples: int | None,
    batch_size: int | None,
) -> tuple[float, str] | None:
    """Return the traffic of one sample in bytes and how it is known, or None if it isn't.

    ``parameters`` of the model, which the user gives, replace what was ``measured`` in earlier
    jobs. ``samples`` are those of an epoch, ``batch_size`` those of a local step.
    """
    if parameters is None:
        return None if measured is None else (measured, "as in an earlier job")
    interval = _interval(spec, samples, batch_size)
    width = BYTES_PER_NUMBER.get(str(getattr(spec.update, "codec", "")))
    if interval is None:
        return None
    limit = "" if width else "at most "
    source = (
        f"{limit}if {parameters} parameters are pushed and fetched once in {interval:g} samples"
    )
    return 2 * (width or BYTES_PER_NUMBER["float32"]) * parameters / interval, source


def traffic(
    per_sample: tuple[float, str],
    samples: int,
    rows: Sequence[OfferView],
    providers: Mapping[str, str],
    store_zone: str | None,
) -> TrafficEstimateView:
    """Return the traffic of a job with so many samples, which the machines share evenly.

    ``providers`` are those of the pools. ``store_zone`` is None if it is unknown.
    """
    number, source = per_sample
    total = number * samples
    machines = sum(row.machines for row in rows)
    if store_zone is None or not machines:
        return TrafficEstimateView(
            total_bytes=total, between_zones=None, usd=None, assumption=source
        )
    away = [row for row in rows if row.zone != store_zone]
    share = total / machines
    prices = {row.pool: USD_PER_GB.get(providers.get(row.pool, ""), 0.0) for row in away}
    return TrafficEstimateView(
        total_bytes=total,
        between_zones=share * sum(row.machines for row in away),
        usd=share / GIGABYTE * sum(row.machines * prices[row.pool] for row in away),
        assumption=source,
    )


def described(traffic: TrafficEstimateView, store_zone: str | None) -> str:
    """Return the line for people."""
    line = f"workers push and fetch {traffic.total_bytes / GIGABYTE:.3g} GB, {traffic.assumption}"
    if traffic.between_zones is None or traffic.usd is None:
        return f"{line}; the store's zone is unknown, so the price between zones is, too"
    return (
        f"{line}; {traffic.between_zones / GIGABYTE:.3g} GB of it between zones (the store is in "
        f"{store_zone}) for about {traffic.usd:.2f} USD, which the cost does not include"
    )


def _interval(spec: JobSpec, samples: int | None, batch_size: int | None) -> float | None:
    """Return the samples between two pushes, or None if unknown."""
    steps, subtasks = spec.push_interval, spec.subtasks_per_epoch
    if steps == "subtask":
        return None if samples is None or subtasks is None else samples / subtasks
    return None if batch_size is None else float(steps * batch_size)
