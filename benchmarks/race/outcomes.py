"""Figures of one run, the results file, and what is left to run; pure but for that file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure.goodput import MachineLife, Observations

RESULTS = Path(__file__).resolve().parents[1] / "results" / "race.jsonl"
TARGET = 0.985
#: A run without progress for this long at its end hangs: at least, and in rounds of local steps.
HUNG_SECONDS, HUNG_ROUNDS = 25.0, 12.0
#: Points of a run's curve that are kept.
CURVE_POINTS = 60

Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Conditions that all runs of a table have in common.

    ``model`` is that of :mod:`common`, and a round of local steps is ``sync_every`` steps.
    """

    workers: int = 4
    batch: int = 64
    pace_ms: float = 80.0
    sync_every: int = 20
    seconds: float = 60.0
    model: str = "cnn"

    @property
    def pace(self) -> float:
        """Samples per second of a machine that does nothing but steps."""
        return self.batch / (self.pace_ms / 1000)

    @property
    def hung_seconds(self) -> float:
        """Seconds without progress at the end of a run that hangs."""
        return max(HUNG_SECONDS, HUNG_ROUNDS * self.sync_every * self.pace_ms / 1000)


#: The workloads of the race, by their models.
WORKLOADS = {
    each.model: each
    for each in (
        Workload(),
        Workload(pace_ms=500.0, sync_every=10, seconds=120.0, model="transformer"),
    )
}


@dataclass(frozen=True)
class Heat:
    """One run: a contender under a fault, for the ``number``-th time."""

    contender: str
    column: str
    number: int

    def __str__(self) -> str:
        return f"{self.contender}, {self.column}, run {self.number + 1}"


@dataclass
class Seen:
    """Observations of a run. Times are Unix times; ``window`` is the measured span."""

    observations: Observations
    window: tuple[float, float]
    #: When the first machine began to train; None if none has.
    began: float | None = None
    accuracies: list[tuple[float, float]] = field(default_factory=list)
    faults: int = 0
    missed: int = 0
    carried_bytes: int | None = None
    #: Processor seconds of programs that don't belong to the run, per processor.
    others: float | None = None
    repeated: int | None = None


def figures(seen: Seen, workload: Workload) -> Row:
    """Return the figures of a run.

    ``share`` is the samples that came into the model over those that the machines compute at
    their pace, from their first step to their end; ``share_with_boot`` counts from their launch.
    Both are None if no machine made a step. ``others`` is the share of the processors that other
    programs used.
    """
    since, until = seen.window
    watched, pace = seen.observations, workload.pace
    samples = watched.samples(since, until)
    replaced = watched.replacements(since)
    pause = watched.max_pause(since, until)
    last = max([at for at, _ in watched.progress if at <= until], default=since)
    return {
        "ended": "hung" if until - last >= workload.hung_seconds else "ok",
        "samples_per_s": round(samples / (until - since), 1),
        "share": _share(samples, pace, watched.machine_seconds(since, until)),
        "share_with_boot": _share(
            samples, pace, watched.machine_seconds(since, until, booting=True)
        ),
        "target_s": seconds_to_target(seen.accuracies, since if seen.began is None else seen.began),
        "accuracy": round(seen.accuracies[-1][1], 4) if seen.accuracies else None,
        "faults": seen.faults,
        "missed": seen.missed,
        "longest_pause_s": round(pause, 2),
        "replaced_s": [round(each, 1) for each in replaced],
        "bytes_per_s": None
        if seen.carried_bytes is None
        else round(seen.carried_bytes / (until - since)),
        "others": None if seen.others is None else round(seen.others / (until - since), 2),
        "repeated": seen.repeated,
        "curve": curve(watched, since, until),
    }


def _share(samples: float, pace: float, machine_seconds: float) -> float | None:
    return round(samples / (pace * machine_seconds), 4) if machine_seconds else None


def seconds_to_target(accuracies: Iterable[tuple[float, float]], since: float) -> float | None:
    """Return when the first snapshot had the target accuracy; None if none had."""
    return next((round(at - since, 1) for at, value in accuracies if value >= TARGET), None)


def curve(watched: Observations, since: float, until: float) -> list[list[float]]:
    """Return seconds and samples since the start, at evenly spaced times."""
    step = (until - since) / CURVE_POINTS
    moments = [since + step * nth for nth in range(CURVE_POINTS + 1)]
    return [[round(at - since, 1), round(watched.samples(since, at))] for at in moments]


# -- what the machines of peers reported -----------------------------------------------------


def observe(
    launched: dict[str, float], ended: dict[str, float], lines: dict[str, Sequence[Row]]
) -> Observations:
    """Return what is known from each machine's launch and end, and from its own lines.

    A line is of the kind ``step``, the first step, or ``commit``, with the samples in the model.
    """
    seen = Observations()
    commits: list[tuple[float, int]] = []
    for name, at in launched.items():
        life = MachineLife(at, ended=ended.get(name))
        own = lines.get(name, ())
        life.trained = next((line["at"] for line in own if line["kind"] == "step"), None)
        made = [(line["at"], line["total"]) for line in own if line["kind"] == "commit"]
        life.pushed = made[0][0] if made else None
        seen.machines[name] = life
        commits += made
    seen.progress = _changes(sorted(commits))
    seen.losses = sorted(ended.values())
    return seen


def _changes(commits: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the commits that changed the total: each machine reports the same one."""
    changes: list[tuple[float, int]] = []
    for at, total in commits:
        if not changes or total != changes[-1][1]:
            changes.append((at, total))
    return changes


def parse_lines(text: str) -> list[Row]:
    """Parse a machine's file, whose last line may be incomplete."""
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


# -- the results file ------------------------------------------------------------------------


def key(row: Row) -> tuple[Heat, Workload]:
    """Return what identifies a row."""
    heat = Heat(row["contender"], row["column"], row["number"])
    return heat, Workload(**row["workload"])


def make_row(heat: Heat, workload: Workload, content: Row) -> Row:
    """Return a complete row; ``content`` is :func:`figures`, or ``{"ended": "error: …"}``."""
    return {**asdict(heat), "workload": asdict(workload), **content}


def read_rows(path: Path = RESULTS) -> list[Row]:
    """Read all rows; the last one of a run counts."""
    if not path.exists():
        return []
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return list({key(row): row for row in rows}.values())


def append_row(row: Row, path: Path = RESULTS) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def missing(
    contenders: Sequence[str],
    columns: Sequence[str],
    runs: int,
    workload: Workload,
    rows: Iterable[Row],
) -> Iterator[Heat]:
    """Yield what has no row yet, such that the contenders take turns."""
    done = {key(row) for row in rows}
    for number in range(runs):
        for column in columns:
            for contender in contenders:
                heat = Heat(contender, column, number)
                if (heat, workload) not in done:
                    yield heat
