"""Settings of a job that are valid, but known to train badly."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vcasgd.spec.job import JobSpec

#: Largest final loss of each rule with its defaults, as a multiple of that of one process: with one
#: worker, and with eight. Measured by ``benchmarks/learning/stability.py`` on short jobs.
LOSSES: dict[str, tuple[float, float]] = {
    "rounds": (1.00, 1.09),
    "vc-asgd": (1.69, 2.83),
    "sma": (1.14, 2.35),
    "async-local-sgd": (1.12, 18.15),
}
#: Ratio of the losses above which settings count as unstable.
LIMIT = 1.1
#: Local steps from which on encodings have larger ratios under the default rule, with
#: ``COARSE_WORKERS`` or more.
COARSE_STEPS = {"int2": 64, "topk": 16}
COARSE_WORKERS = 8


@dataclass(frozen=True)
class SettingWarning:
    """A setting that may disappoint its user. ``field`` is its path in the job file."""

    field: str
    message: str
    remedy: str


def unstable_settings(spec: JobSpec) -> list[SettingWarning]:
    """Return a warning for each setting that the stability benchmark found to end badly."""
    one, eight = LOSSES[spec.update.rule]
    loss = one if spec.workers.max == 1 else eight
    if loss > LIMIT:
        workers = "one worker" if spec.workers.max == 1 else "eight workers"
        message = (
            f"short jobs with {spec.update.rule} and {workers} ended with up to {loss:.1f} times "
            "the loss of one process"
        )
        remedy = "leave it out to train as on one machine; docs/learning.md has the measurements"
        return [SettingWarning("update.rule", message, remedy)]
    steps, codec = spec.push_every, spec.update.codec
    long = isinstance(steps, int) and steps >= COARSE_STEPS.get(codec, math.inf)
    if long and spec.workers.max >= COARSE_WORKERS:
        message = f"a loss more than {LIMIT:g} times that of one process was measured with {codec}"
        return [SettingWarning("push_every", message, "shorten it, or use int8")]
    return []
