"""Columns of the race: when which fault happens; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from links import LinkSpeed
from vcasgd.fleet.histories import machines

SLOW = LinkSpeed(mbit=100.0, delay_ms=25.0)
TRACES = Path(__file__).resolve().parents[1] / "cifar10" / "traces"
TRACE = TRACES / "aws-v100-4node-us-east-2a-2023-08-03.json"
#: Makes losses of several days fall into a minute.
TRACE_FASTER = 2000.0


class Action(StrEnum):
    """Effect of a fault."""

    KILL = "kill"
    NOTICE = "notice"
    SLOW = "slow"
    COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Column:
    """A kind of fault. ``every`` is in seconds, and 0 if it happens once, at the start."""

    name: str
    title: str
    action: Action | None = None
    every: float = 0.0
    at_once: int = 1
    trace: bool = False
    #: Links of the machines; None if they are as fast as the computer.
    link: LinkSpeed | None = None


COLUMNS = {
    column.name: column
    for column in (
        Column("quiet", "no faults"),
        Column("kill", "kill -9 of a machine every 15 s", Action.KILL, 15.0),
        Column("notice", "5 s of notice to a machine every 15 s", Action.NOTICE, 15.0),
        Column("bulk", "3 of 4 machines killed at once every 30 s", Action.KILL, 30.0, at_once=3),
        Column("slow", "one machine 4 times slower", Action.SLOW),
        Column("trace", "losses of a recorded spot history", Action.KILL, trace=True),
        Column("coordinator", "the coordinator killed every 30 s", Action.COORDINATOR, 30.0),
        Column("slow-links", "links of 100 Mbit/s, round trips of 50 ms", link=SLOW),
    )
}
#: Seconds of the notice of an eviction.
NOTICE_SECONDS = 5.0


@dataclass(frozen=True)
class Event:
    """A fault at a time, in seconds since all workers have contributed.

    ``turn`` counts the events of a column over its runs, so that each run continues a cycle.
    """

    at: float
    action: Action
    machines: int
    turn: int


def schedule(column: Column, seconds: float, workers: int, number: int) -> list[Event]:
    """Return the events of the run with this number, in order.

    The last one is early enough to see what follows: half of ``every`` before the end.
    """
    if column.action is None:
        return []
    if column.trace:
        lives = machines(workers, TRACE, TRACE_FASTER, number)
        times = sorted(life.stop for life in lives if life.stop < seconds)
    elif column.every:
        count = int((seconds - column.every / 2) // column.every)
        times = [column.every * (nth + 1) for nth in range(count)]
    else:
        times = [0.0]
    first = number * len(times)
    at_once = min(column.at_once, workers)
    return [Event(at, column.action, at_once, first + nth) for nth, at in enumerate(times)]
