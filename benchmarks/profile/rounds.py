"""Measure where the time of a round of one local step goes.

    python benchmarks/profile/rounds.py [--workers 4] [--seconds 20] [--step-ms 80] [--busy-ms 0]
        [--numbers 33914] [--codec float32]

Starts a stack and prints the mean duration of each part of a round, from one version of the model
to the next: of the worker that the round waited for, whose parts add up to the round, and of all
workers. Steps are paced; ``--busy-ms`` is what a step computes meanwhile, so that you see what
shared processors cost.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from exchange import await_updates
from timed.timed import (
    ACCEPTED,
    BEGIN,
    GRADIENTS,
    LOADED,
    MARKS,
    NEWS,
    STEP,
    TRAIN,
    TRAINED,
)

from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, running

TASK = Path(__file__).resolve().parent / "timed"
#: Samples of a worker's step.
SAMPLES = 64
#: Seconds of a commit's time, of which only milliseconds are known.
HALF = 0.0005
#: Parts of a round of one worker, each with the mark at its end.
PARTS = {
    "the news and the model reach the worker": NEWS,
    "settle the last update, take over the base": BEGIN,
    "start the interval": TRAIN,
    "load the model": LOADED,
    "load the batch": STEP,
    "the paced step": GRADIENTS,
    "optimizer, read the update": TRAINED,
    "push it, until it is accepted": ACCEPTED,
    "wait for others; blend and commit": "",
}


@dataclass(frozen=True)
class Turn:
    """One worker's part in a round, from a commit to the next one, seconds since 1970."""

    committed: float
    marks: dict[str, float]
    next_commit: float

    def parts(self) -> Iterator[tuple[str, float]]:
        """Yield the seconds of each part."""
        at = self.committed
        for part, end in PARTS.items():
            reached = self.marks[end] if end else self.next_commit
            yield part, reached - at
            at = reached


def turns_of(lines: list[str]) -> Iterator[Turn]:
    """Yield the turns in what a worker has recorded; those without all marks are left out."""
    rounds: list[tuple[float, dict[str, float]]] = []
    for line in lines:
        at, name, *more = line.split()
        if name == NEWS:
            committed = int(more[0]) / 1000 + HALF
            # A wait that ends without a new version tells the last one again.
            if rounds and rounds[-1][0] == committed:
                continue
            rounds.append((committed, {}))
        if rounds:
            rounds[-1][1][name] = float(at)
    for (committed, marks), (following, _) in pairwise(rounds):
        if marks.keys() == set(MARKS) and following > committed:
            yield Turn(committed, marks, following)


def table(turns: list[Turn]) -> Iterator[str]:
    by_round: dict[float, list[Turn]] = defaultdict(list)
    for each in turns:
        by_round[each.committed].append(each)
    most = max(map(len, by_round.values()))
    rounds = [each for each in by_round.values() if len(each) == most]
    last = [max(each, key=lambda one: one.marks[ACCEPTED]) for each in rounds]
    everyone = [turn for each in rounds for turn in each]
    means: list[dict[str, float]] = []
    for some in (last, everyone):
        sums: defaultdict[str, list[float]] = defaultdict(list)
        for turn in some:
            for part, seconds in turn.parts():
                sums[part].append(seconds)
        means.append({part: 1000 * mean(values) for part, values in sums.items()})
    yield f"{len(rounds)} rounds of {most} workers, milliseconds"
    yield ""
    yield "| part | the last worker | all workers |"
    yield "| --- | --- | --- |"
    for part in PARTS:
        yield f"| {part} | {means[0][part]:.2f} | {means[1][part]:.2f} |"
    yield f"| **sum** | **{sum(means[0].values()):.2f}** | **{sum(means[1].values()):.2f}** |"


def measure(given: argparse.Namespace) -> list[Turn]:
    with tempfile.TemporaryDirectory(prefix="vcasgd-rounds-") as folder:
        home = Path(folder) / "home"
        marks = Path(folder) / "marks"
        marks.mkdir()
        settings = Settings(home=home, api_port=0, local_capacity=given.workers)
        with running(settings) as state:
            token = StackHome(settings.home_path).token() or ""
            with Client(state.api_url, token) as client:
                name = client.submit_directory(job(given, marks)).id
                await_updates(client, name)
                before = {each: each.read_text().count("\n") for each in marks.iterdir()}
                time.sleep(given.seconds)
                lines = {each: each.read_text().splitlines() for each in marks.iterdir()}
                client.job(name).cancel()
    return [turn for each in lines for turn in turns_of(lines[each][before.get(each, 0) : -1])]


def job(given: argparse.Namespace, folder: Path) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "rounds",
            "task": "timed:Timed",
            "working_dir": str(TASK),
            "args": {
                "folder": str(folder),
                "numbers": given.numbers,
                "batch_size": SAMPLES * given.workers,
                "workers": given.workers,
                "step_seconds": given.step_ms / 1000,
                "busy_seconds": given.busy_ms / 1000,
            },
            "epochs": 1_000,
            "push_every": 1,
            "update": {"codec": given.codec},
            "workers": {"min": given.workers, "max": given.workers},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=80.0)
    parser.add_argument("--busy-ms", type=float, default=0.0)
    parser.add_argument("--numbers", type=int, default=33_914, help="parameters of the model")
    parser.add_argument("--codec", default="float32", help="encoding of updates")
    print("\n".join(table(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
