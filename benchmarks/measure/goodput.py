"""Figures of a run in which machines are lost; pure. Times are seconds of any one clock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

#: Length and number of the spans that must have about the same rate of progress.
SPAN_SECONDS, SPANS = 5.0, 3
#: Largest difference between their rates, as a share of the mean.
MAX_DIFFERENCE = 0.05


@dataclass
class MachineLife:
    """When a machine was launched, trained and pushed for the first time, and ended; None if it has
    not yet."""

    launched: float
    trained: float | None = None
    pushed: float | None = None
    ended: float | None = None

    def seconds(self, since: float, until: float, *, booting: bool) -> float:
        """Return how long the machine existed within ``[since, until]``."""
        begin = self.launched if booting else self.trained
        if begin is None:
            return 0.0
        end = until if self.ended is None else min(until, self.ended)
        return max(0.0, end - max(since, begin))


@dataclass
class Observations:
    """Observations of a run.

    ``progress`` are times at which the model changed, with the samples applied until then, and
    ``losses`` the times at which machines were lost; both ascend.
    """

    machines: dict[str, MachineLife] = field(default_factory=dict)
    progress: list[tuple[float, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def samples(self, since: float, until: float) -> float:
        """Return the samples applied within ``[since, until]``."""
        return self._applied(until) - self._applied(since)

    def _applied(self, at: float) -> float:
        """Return the samples applied until a moment; those of an update count evenly since the
        last one."""
        place = bisect_right(self.progress, at, key=lambda point: point[0])
        if place in (0, len(self.progress)):
            return self.progress[-1][1] if place else 0.0
        (since, before), (until, after) = self.progress[place - 1 : place + 1]
        return before + (after - before) * (at - since) / (until - since)

    def is_settled(self, since: float, now: float) -> bool:
        """Return True if the last spans of time since a moment had about the same progress."""
        starts = [now - SPAN_SECONDS * (nth + 1) for nth in range(SPANS)]
        if starts[-1] < since:
            return False
        done = [self.samples(start, start + SPAN_SECONDS) for start in starts]
        mean = sum(done) / SPANS
        return mean > 0 and max(done) - min(done) <= MAX_DIFFERENCE * mean

    def machine_seconds(self, since: float, until: float, *, booting: bool = False) -> float:
        """Return the seconds of all machines within ``[since, until]``."""
        lives = self.machines.values()
        return sum(each.seconds(since, until, booting=booting) for each in lives)

    def max_pause(self, since: float, until: float) -> float:
        """Return the longest time without progress within ``[since, until]``."""
        moments = [since, *(at for at, _ in self.progress if since < at < until), until]
        return max(later - earlier for earlier, later in pairwise(moments))

    def replacements(self, since: float) -> list[float]:
        """Return, for each loss, the seconds until its replacement pushed for the first time.

        The first machine that was launched after ``since`` replaces the first lost one, and so on;
        losses whose replacement has not pushed yet are left out. Negative if it came before the
        loss, because it is ordered at the notice.
        """
        new = sorted(
            (each.launched, each.pushed)
            for each in self.machines.values()
            if each.launched > since and each.pushed is not None
        )
        pairs = zip(self.losses, new, strict=False)
        return [pushed - lost for lost, (_, pushed) in pairs]


@dataclass(frozen=True)
class GoodputFigures:
    """Result of a run; ``python -m benchmarks.measure goodput --json`` prints its fields.

    ``goodput`` is the samples that were applied while there were faults over what machines of the
    quiet time, before the first fault, would have done in the machine-seconds that existed. It
    leaves out the time to boot, which ``goodput_with_boot`` includes. The quiet time began
    ``settled_after_s`` after all machines had pushed; None if their progress did not settle.
    ``share_of_pace`` compares with machines that do nothing but steps, and depends on no quiet
    time. ``replaced_s`` are the seconds from each loss to the first push of the replacement, to
    about one heartbeat, and ``wasted_s`` machine-seconds by cause.
    """

    quiet_samples_per_s: float
    faulty_samples_per_s: float
    goodput: float
    goodput_with_boot: float
    share_of_pace: float
    losses: int
    replaced_s: list[float]
    replaced_median_s: float | None
    longest_pause_s: float
    wasted_s: dict[str, float]
    settled_after_s: float | None = None
    samples_lost: int | None = None
    samples_repeated: int | None = None

    @classmethod
    def of(
        cls,
        seen: Observations,
        quiet: tuple[float, float],
        faulty: tuple[float, float],
        wasted: Mapping[str, float],
        pace: float,
    ) -> GoodputFigures:
        """Return the figures of two spans of time of a run.

        ``pace``: samples per second of a machine that does nothing but steps.
        """
        rate = seen.samples(*quiet) / max(seen.machine_seconds(*quiet), 1e-9)
        done = seen.samples(*faulty) / max(rate, 1e-9)
        replaced = seen.replacements(faulty[0])
        return cls(
            quiet_samples_per_s=round(seen.samples(*quiet) / (quiet[1] - quiet[0]), 1),
            faulty_samples_per_s=round(seen.samples(*faulty) / (faulty[1] - faulty[0]), 1),
            goodput=round(done / seen.machine_seconds(*faulty), 4),
            goodput_with_boot=round(done / seen.machine_seconds(*faulty, booting=True), 4),
            share_of_pace=round(seen.samples(*faulty) / (pace * seen.machine_seconds(*faulty)), 4),
            losses=len(seen.losses),
            replaced_s=[round(each, 1) for each in replaced],
            replaced_median_s=round(median(replaced), 1) if replaced else None,
            longest_pause_s=round(seen.max_pause(*faulty), 2),
            wasted_s={name: round(seconds, 1) for name, seconds in wasted.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the value that ``--json`` prints."""
        return asdict(self)
