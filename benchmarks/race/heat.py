"""Run one heat: ``run.py`` starts this script for each, in a network of its own if it may.

Prints the row as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.measure.goodput import Observations
from cluster import PeerCluster
from common import CNN
from entrants import ENTRANTS
from faults import COLUMNS, NOTICE_SECONDS, Action, Event, schedule
from judge import judge
from links import Links
from outcomes import Heat, Row, Seen, Workload, figures, make_row
from pace import BEGAN_FILE, SLOW_FILE

#: Seconds until all machines have contributed.
START_SECONDS = 180.0
#: Seconds for a fault to find enough machines.
FIRE_SECONDS = 10.0
POLL_SECONDS = 0.1


class Cluster(Protocol):
    """A contender's machines."""

    @property
    def trainers(self) -> int: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def contributors(self) -> list[str]: ...
    def kill(self, names: list[str]) -> None: ...
    def notice(self, name: str, seconds: float) -> None: ...
    def kill_coordinator(self, turn: int) -> str: ...
    def observations(self) -> Observations: ...
    def repeated(self) -> int | None: ...
    def why(self) -> str: ...


def make_cluster(
    heat: Heat, workload: Workload, folder: Path, data: Path, links: Links | None
) -> Cluster:
    entrant = ENTRANTS[heat.contender]
    if entrant.script:
        return PeerCluster(entrant, workload, folder, data, links)
    # Imported here, because it takes seconds.
    from ours import OurCluster
    from ours_joined import JoinedCluster

    if links is not None:
        return JoinedCluster(workload, folder, data, entrant, links)
    return OurCluster(workload, folder, data, entrant, COLUMNS[heat.column].at_once)


def run_heat(heat: Heat, workload: Workload, data: Path, isolated: bool) -> Row:
    """Return the row of a run. What goes wrong in a contender is its result."""
    speed = COLUMNS[heat.column].link
    with (
        tempfile.TemporaryDirectory(prefix="vcr-", dir="/tmp") as name,
        closing(Links(speed)) if speed else nullcontext() as links,
    ):
        folder = Path(name)
        cluster = make_cluster(heat, workload, folder, data, links)
        try:
            cluster.start()
            _log("waits for all machines")
            if not _await(lambda: len(cluster.contributors()) >= cluster.trainers, START_SECONDS):
                return {"ended": f"did not start: {cluster.why()}"}
            _log(f"all {cluster.trainers} machines train")
            seen = _measure(cluster, heat, workload, folder, links)
            if not isolated:
                seen.carried_bytes = seen.others = None
        finally:
            cluster.close()
        if (folder / BEGAN_FILE).exists():
            seen.began = float((folder / BEGAN_FILE).read_text())
        if workload.model == CNN:
            _log("judges the snapshots")
            seen.accuracies = judge(folder / "snapshots", data, seen.window[1])
        return figures(seen, workload)


def _measure(
    cluster: Cluster, heat: Heat, workload: Workload, folder: Path, links: Links | None
) -> Seen:
    rng = random.Random(heat.number)
    column = COLUMNS[heat.column]
    faults = missed = 0
    carried = links.carried if links else loopback_bytes
    start, before, processors = time.time(), carried(), processor_seconds()
    for event in schedule(column, workload.seconds, cluster.trainers, heat.number):
        time.sleep(max(0.0, start + event.at - time.time()))
        fired = _fire(cluster, event, rng, folder)
        _log(f"{event.at:6.1f} s: {event.action} {fired or 'found no machine'}")
        faults += len(fired)
        missed += event.machines - len(fired)
    time.sleep(max(0.0, start + workload.seconds - time.time()))
    window = (start, time.time())
    seen = Seen(cluster.observations(), window, faults=faults, missed=missed)
    seen.carried_bytes = carried() - before
    busy, own = (
        after - first for first, after in zip(processors, processor_seconds(), strict=True)
    )
    seen.others = max(0.0, busy - own) / (os.cpu_count() or 1)
    seen.repeated = cluster.repeated()
    return seen


def _fire(cluster: Cluster, event: Event, rng: random.Random, folder: Path) -> list[str]:
    if event.action is Action.COORDINATOR:
        return [cluster.kill_coordinator(event.turn)]
    enough = min(event.machines, cluster.trainers)
    _await(lambda: len(cluster.contributors()) >= enough, FIRE_SECONDS)
    present = cluster.contributors()
    chosen = rng.sample(present, min(enough, len(present)))
    if event.action is Action.SLOW:
        (folder / SLOW_FILE).write_text(chosen[0])
    elif event.action is Action.NOTICE:
        for name in chosen:
            cluster.notice(name, NOTICE_SECONDS)
    else:
        cluster.kill(chosen)
    return chosen


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface of this network has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[0])
    return 0


def processor_seconds() -> tuple[float, float]:
    """Return the processor seconds of the whole computer, and of this process namespace."""
    total = psutil.cpu_times()
    busy = sum(total) - total.idle - total.iowait
    # With children that have ended, such as killed machines.
    own = [sum((each.info["cpu_times"] or ())[:4]) for each in psutil.process_iter(["cpu_times"])]
    return busy, sum(own)


def _await(done: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _log(text: str) -> None:
    print(f"    {time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("heat", type=json.loads)
    parser.add_argument("workload", type=json.loads)
    parser.add_argument("data", type=Path)
    parser.add_argument("--isolated", action="store_true", help="the network is this run's own")
    given = parser.parse_args()
    heat, workload = Heat(**given.heat), Workload(**given.workload)
    row = make_row(heat, workload, run_heat(heat, workload, given.data, given.isolated))
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
