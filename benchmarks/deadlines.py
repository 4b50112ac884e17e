"""Deadlines on recorded histories of spot machines: how often they are met, and for how much.

    python benchmarks/deadlines.py [--starts 100] [--seed 2] [--traces FOLDER]

Starts jobs at random times of each history in a folder, with each rule of :data:`RULES`, and
compares them with a planner that knows the future. A part of the runs goes through the controller's
own plan of the fleet. Writes ``benchmarks/results/deadlines.md``.
"""

from __future__ import annotations

import argparse
import math
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from markdown import table
from vcasgd.fleet import deadline
from vcasgd.fleet.deadline import DeadlineRun, Outlook, Work, outlook, simulate, with_deadline
from vcasgd.fleet.histories import read_counts
from vcasgd.fleet.observed import (
    JobDemand,
    Market,
    ObservationTimes,
    Observed,
    PoolStatus,
    WorkerView,
    with_history,
)
from vcasgd.fleet.plan import Launch
from vcasgd.fleet.plan.decide import make_plan
from vcasgd.schemas.costs import Offer
from vcasgd.schemas.fleet import Machine, MachineState

HERE = Path(__file__).resolve().parent
#: Seconds of a simulated step, and from the purchase of a machine until it trains.
STEP, DELAY = 60.0, 300.0
#: Price of a spot machine, where one on demand costs 1: as in the package's tables of Google Cloud
#: for machines with GPUs and without.
PRICES = (0.4, 0.21)
#: Time until the deadline, over that of the job with all machines from start to end.
TIGHTNESS = (1.15, 1.5, 2.0)
#: Most machines of a job, and the share of a history that the longest deadline may take.
MOST, SHARE = 16, 0.4
HOURS = 8.0

#: Returns the most new spot machines if the other places are filled on demand; None: it waits.
Rule = Callable[[Outlook, float], int | None]


def uniform(left: float) -> Rule:
    """Uniform progress: on demand while the job is behind a line from its start to its deadline."""

    def spot(now: Outlook, done: float) -> int | None:
        if now.slack <= 2 * now.delay:
            return 0
        return now.places if done < 1 - now.left / left else None

    return spot


def greedy(now: Outlook, _: float) -> int | None:
    """Wait until there is just enough time on demand."""
    return 0 if now.slack <= now.delay else None


def rules(work: Work) -> dict[str, Rule]:
    """Return the rules that are compared, by their names in the report."""
    return {
        "vcasgd": lambda now, _: now.spot,
        "greedy": greedy,
        "uniform progress": uniform(work.left),
        "on demand only": lambda _now, _done: 0,
        "spot only": lambda _now, _done: None,
    }


@dataclass(frozen=True)
class History:
    """Number of spot machines for sale in each step."""

    name: str
    counts: list[int]
    places: int

    @classmethod
    def read(cls, file: Path) -> History:
        counts, gap = read_counts(file, MOST)
        total = int(len(counts) * gap / STEP)
        steps = [counts[min(int(n * STEP / gap), len(counts) - 1)] for n in range(total)]
        return cls(file.stem, steps, max(steps))

    def hours(self) -> float:
        """Return the length of a job that fits into the history several times."""
        return min(HOURS, SHARE * len(self.counts) * STEP / 3600 / max(TIGHTNESS))


def known_future(work: Work, counts: Sequence[int]) -> float:
    """Return a lower bound of the cost in USD with the future known.

    Spot machines are used in their longest lives, each after a boot, and the rest is done on demand
    with the fewest boots.
    """
    steps = [min(count, work.places) for count in counts[: int(work.left / STEP)]]
    alive: list[int] = []
    useful: list[float] = []
    for number, count in enumerate([*steps, 0]):
        while len(alive) > count:
            useful.append((number - alive.pop()) * STEP - work.delay)
        alive += [number] * (count - len(alive))
    rest, seconds = work.seconds, 0.0
    for each in sorted(useful, reverse=True):
        dear = each <= 0 or (each + work.delay) * work.spot_price > each * work.on_demand_price
        if rest <= 0 or dear:
            break
        seconds += min(each, rest) + work.delay
        rest -= min(each, rest)
    firm = rest + work.delay * math.ceil(rest / work.left) if rest > 0 else 0.0
    return (seconds * work.spot_price + firm * work.on_demand_price) / 3600


def cases(
    history: History, price: float, starts: int, rng: random.Random
) -> Iterator[tuple[float, Work, Sequence[int]]]:
    """Yield the tightness, the work, and the history from a random start on."""
    seconds = history.hours() * 3600
    for tightness in TIGHTNESS:
        left = seconds * tightness
        work = Work(
            seconds * history.places, (1 - deadline.END_PART) * left, history.places,
            min(DELAY, seconds / 20), price, 1.0,
        )  # fmt: skip
        length = int(left / STEP)
        for _ in range(starts):
            start = rng.randrange(len(history.counts) - length)
            yield tightness, work, history.counts[start : start + 2 * length]


# -- the same through the plan of the fleet -------------------------------------------------------


class PlannedFleet:
    """Machines that the controller's plan buys, replaces, and ends in simulated time."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._machines: dict[str, Machine] = {}
        self._workers: dict[str, str] = {}
        self._history = ObservationTimes(since=0.0)
        self._market, self._refusals = Market(), 0
        self._draining: dict[str, str | None] = {}
        self._offers = (
            Offer(pool="p", zone="z", machine_type="t", spot=True, price_per_hour=work.spot_price,
                  on_demand_price_per_hour=work.on_demand_price, cpus=1.0, gpus=0, as_of=0.0,
                  source=""),
        )  # fmt: skip

    def run(self, counts: Sequence[int]) -> DeadlineRun:
        """Run the job as :func:`simulate` does."""
        work, run, rest = self._work, DeadlineRun(), self._work.seconds
        for number, room in enumerate(counts):
            now = number * STEP
            self._lose(room)
            joined = {
                one.id for one in self._machines.values() if now - one.launched_at >= work.delay
            }
            busy = min(work.places, sum(machine in joined for machine in self._workers.values()))
            part = min(1.0, rest / (STEP * busy)) if busy else 1.0
            rest -= part * STEP * busy
            per_hour = sum(one.price_per_hour for one in self._machines.values())
            run.usd += part * STEP * per_hour / 3600
            if rest <= 1e-9:
                run.ended = now + part * STEP
                return run
            self._decide(now + STEP, room, rest, joined)
        return run

    def _lose(self, room: int) -> None:
        spot = [one.id for one in self._machines.values() if one.spot]
        for name in spot[room:]:
            self._end(name)

    def _end(self, name: str) -> None:
        self._machines.pop(name, None)
        self._workers = {worker: one for worker, one in self._workers.items() if one != name}

    def _decide(self, now: float, room: int, rest: float, joined: set[str]) -> None:
        work, machines = self._work, self._machines
        ages = deadline.ages_on_demand(machines.values(), now)
        view = outlook(work.left - now, rest / work.places, work.places, work.delay, ages)
        spot = sum(one.spot for one in machines.values())
        demand = JobDemand("j", 1, work.places, ("p",), 10**6, True)
        pool = PoolStatus("p", offers=self._offers, markets={("z", True): self._market})
        state = Observed(
            ledger="c",
            machines=tuple(machines.values()),
            nodes=frozenset(joined & machines.keys()),
            workers=tuple(WorkerView(w, "j", one, True) for w, one in self._workers.items()),
            jobs=(with_deadline(demand, view, 300.0, spot),),
            pools=(replace(pool, boot_seconds=2 * work.delay),),
            history=self._history,
            draining=self._draining,
        )
        state = with_history(state, now)
        self._history = state.history
        for name in self._draining:
            self._workers.pop(name, None)
        plan = make_plan(state, now)
        self._draining = {stop.name: None for stop in plan.stops}
        for end in plan.ends:
            self._end(end.machine_id)
        for start in plan.starts:
            self._workers[f"j.{start.machine_id}"] = start.machine_id
        for launch in plan.launches:
            self._launch(launch, now, room)

    def _launch(self, order: Launch, now: float, room: int) -> None:
        held = sum(one.spot for one in self._machines.values())
        got = min(order.count, max(0, room - held)) if order.spot else order.count
        price = self._work.spot_price if order.spot else self._work.on_demand_price
        for index in range(got):
            name = f"m{now:.0f}-{order.spot}-{index}"
            self._machines[name] = Machine(
                id=name, pool="p", state=MachineState.RUNNING, launched_at=now, notice_at=None,
                host="h", price_per_hour=price, spot=order.spot, zone="z",
            )  # fmt: skip
        if order.spot and got < order.count:
            self._refusals += 1
            blocked = now + min(300.0, 2.0**self._refusals)
            since = self._market.refused_since
            self._market = Market(0, blocked, "no capacity", now if since is None else since)
        elif order.spot:
            self._market, self._refusals = Market(), 0


# -- report ---------------------------------------------------------------------------------------


@dataclass
class Sums:
    """Outcomes of a rule: deadlines met, and costs over those with the future known."""

    met: list[bool]
    ratios: list[float]

    def text(self) -> str:
        """Return both means."""
        return f"{fmean(self.met):.1%}, {fmean(self.ratios):.2f}"


def compare(
    history: History, price: float, starts: int, seed: int
) -> dict[tuple[float, str], Sums]:
    """Return the outcomes by tightness and rule."""
    found: dict[tuple[float, str], Sums] = {}
    rng = random.Random(f"{seed}/{history.name}/{price}")
    for tightness, work, counts in cases(history, price, starts, rng):
        best = known_future(work, counts)
        for name, rule in rules(work).items():
            run = simulate(work, counts, STEP, rule)
            add(found.setdefault((tightness, name), Sums([], [])), run, work, best)
    return found


def add(sums: Sums, run: DeadlineRun, work: Work, best: float) -> None:
    sums.met.append(run.ended is not None and run.ended <= work.left / (1 - deadline.END_PART))
    sums.ratios.append(run.usd / best)


def through_plan(history: History, price: float, starts: int, seed: int) -> tuple[Sums, float]:
    """Return outcomes through the plan of the fleet, and their mean cost over the simulation's."""
    sums, ratios = Sums([], []), []
    rng = random.Random(f"{seed}/{history.name}/{price}/plan")
    for _, work, counts in cases(history, price, starts, rng):
        run = PlannedFleet(work).run(counts)
        add(sums, run, work, known_future(work, counts))
        ratios.append(run.usd / simulate(work, counts, STEP).usd)
    return sums, fmean(ratios)


PAGE = """\
# Deadlines on recorded histories

    {command}

Jobs of {hours:g} hours with all machines (less in short histories) start at random times of
recorded histories of spot machines, {starts} times in each row, with seed {seed}. A machine joins
after {delay:.0f} s. Machines on demand cost 1 an hour and are always for sale; spot machines cost
the *price*.
The *deadline* is that many times the duration of the job. Each cell has the deadlines met, and
the mean of the cost over a lower bound of that of a planner that knows the future: it boots each
spot machine once, uses the longest lives, and does the rest on demand with the fewest boots.

{rows}

*greedy* buys on demand when there is just enough time left, and nothing else from then on.
*uniform progress* is the rule of "Can't Be Late" (NSDI 2024): on demand while the job is behind a
straight line. All rules replace a machine on demand only once a spot machine trains. The costs of
*spot only* are those until the job ends, or until twice its deadline.

All rows of vcasgd: **{met:.2%}** of {total} deadlines met, at **{ratio:.3f}** times the bound.

## Through the plan of the fleet

The same with the controller's plan (`vcasgd.fleet.plan`), which sees refusals, backs off, starts
and stops workers, and replaces machines; {planned} starts for each deadline, at the price
{price:g}.

{planned_rows}

## The reserve

The rule with other reserves, in losses of a whole fleet in each hour left, on seed 1, on which it
was chosen; at the price {price:g}.

{reserves}

Not simulated: speeds that change, work that is trained again from the last push, and refusals of
machines on demand. The rule keeps {margin:.0%} of the rest and {end:.0%} of the whole time
for them.
"""


def reserve_row(losses: float, histories: Sequence[History], starts: int) -> list[str]:
    """Return a row for a reserve, over all histories and deadlines."""
    before = deadline.LOSSES_PER_HOUR
    deadline.LOSSES_PER_HOUR = losses
    try:
        met: list[bool] = []
        ratios: list[float] = []
        for history in histories:
            rng = random.Random(f"1/{history.name}")
            for _, work, counts in cases(history, PRICES[0], starts, rng):
                sums = Sums(met, ratios)
                add(sums, simulate(work, counts, STEP), work, known_future(work, counts))
        return [f"{losses:g}", f"{fmean(met):.2%}", f"{fmean(ratios):.3f}"]
    finally:
        deadline.LOSSES_PER_HOUR = before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--planned", type=int, default=5, help="starts through the plan")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--traces", type=Path, default=HERE / "cifar10" / "traces")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "deadlines.md")
    given = parser.parse_args()
    histories = [History.read(file) for file in sorted(given.traces.glob("*.json"))]
    rows, planned_rows, ours = [], [], Sums([], [])
    for history in histories:
        for price in PRICES:
            found = compare(history, price, given.starts, given.seed)
            names = list(dict.fromkeys(name for _, name in found))
            for tightness in TIGHTNESS:
                cells = [found[tightness, name].text() for name in names]
                rows.append([history.name, f"{price:g}", f"{tightness:g}", *cells])
                ours.met += found[tightness, "vcasgd"].met
                ours.ratios += found[tightness, "vcasgd"].ratios
            print(
                history.name, price, {key: sums.text() for key, sums in found.items()}, flush=True
            )
        sums, ratio = through_plan(history, PRICES[0], given.planned, given.seed)
        planned_rows.append([history.name, *sums.text().split(", "), f"{ratio:.3f}"])
        print(*planned_rows[-1], flush=True)
    losses = (0.0, 0.25, 0.5, 1.0, 2.0)
    reserves = [reserve_row(each, histories, max(1, given.starts // 2)) for each in losses]
    heads = ["history", "price", "deadline", *names]
    page = PAGE.format(
        command=f"python benchmarks/deadlines.py {shlex.join(sys.argv[1:])}".strip(),
        hours=HOURS, starts=given.starts, seed=given.seed, delay=DELAY, rows=table(heads, rows),
        met=fmean(ours.met), total=len(ours.met), ratio=fmean(ours.ratios), planned=given.planned,
        planned_rows=table(("history", "met", "cost", "over the simulation's"), planned_rows),
        price=PRICES[0], reserves=table(("losses in an hour", "met", "cost"), reserves),
        margin=deadline.WORK_MARGIN - 1, end=deadline.END_PART,
    )  # fmt: skip
    given.out.write_text(page)


if __name__ == "__main__":
    main()
