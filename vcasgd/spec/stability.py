"""Settings of a job that are valid, but known to train badly."""

from __future__ import annotations

from dataclasses import dataclass

from vcasgd.spec.job import JobSpec

#: Largest final loss of each rule with its defaults, as a multiple of that of one process: with one
#: worker, and with eight. Measured by ``benchmarks/learning/stability.py`` on short jobs.
LOSSES: dict[str, tuple[float, float]] = {
    "rounds": (1.00, 1.09),
    "vc-asgd": (1.69, 2.83),
    "fedasync": (1.56, 3.03),
    "easgd": (1.38, 2.41),
    "sma": (1.14, 2.35),
    "async-local-sgd": (1.12, 18.15),
    "downpour": (1.12, 3.10),
    "delayed-nesterov": (1.25, 6.74),
    "fedbuff": (3.95, 5.36),
    "dc-asgd": (1.12, 33.68),
}
#: Ratio of the losses from which on a rule counts as unstable.
LIMIT = 1.1


@dataclass(frozen=True)
class SettingWarning:
    """A setting that may disappoint its user. ``field`` is its path in the job file."""

    field: str
    message: str
    remedy: str


def unstable_settings(spec: JobSpec) -> list[SettingWarning]:
    """Return a warning for each setting that the stability benchmark found to end badly."""
    rule, most = spec.update.rule, spec.workers.max
    one, eight = LOSSES[rule]
    loss = one if most == 1 else eight
    if loss <= LIMIT:
        return []
    workers = "one worker" if most == 1 else "eight workers"
    return [
        SettingWarning(
            "update.rule",
            f"short jobs with {rule} and {workers} ended with up to {loss:.1f} times the loss of "
            "one process",
            "leave it out to train as on one machine; docs/learning.md has the measurements",
        )
    ]
