"""Plan of the fleet: turns desired and observed state into actions, without any I/O.

This module has the actions, and names of launches and markets. The others:

``decide``      what ends, the order of all actions, and why jobs wait
``allocation``  which job gets which machine
``purchases``   what is bought: pool, zone, type, spot or on demand, by its price for a sample
``shares``      in which order jobs get machines, how many those of one user may have, which
                workers a job keeps, and which machines others can take, or get by preemption

Sharing. One worker runs on one machine. Each job first gets its minimum, by priority and then in
order of submission. Each ``age_seconds`` that a job has lacked a part of its minimum count as one
level of priority, so none waits forever. All further machines go to the highest priority first, and
within a priority by weighted max-min fairness: the next machine goes to the job with the fewest
machines for its weight. A place is filled, in this order, by a worker of the job, an idle machine,
a machine whose worker is leaving, the machine of another job's surplus worker, a booting machine,
or a launch. A machine with a notice counts as lost, so its replacement is ordered at the notice.

Preemption. If none of these is available, the machine of another job's worker above its minimum is
taken: for a minimum of any job at once, for a higher priority, and for a job of the same priority
that still has a smaller share afterwards. The last two wait until the job has been short for
``claim_seconds`` and the worker has run for ``hold_seconds``. They don't return a machine to the
job that it was taken from within ``return_seconds``. A worker within its job's minimum is never
preempted.

Limits. All jobs of a user with a limit together get no more machines than that. The limit is
divided like the machines: minimum first, then priority and weight, whether or not machines are
available. Surplus and leaving workers count until they are gone, so a machine is not replaced ahead
of time at the limit. Machines with a notice don't count.

Buying. Pools are used in the job's order. Within a pool, the cheapest measured sample decides.
Zones and types that cost up to :data:`~vcasgd.fleet.plan.purchases.SPREAD_PREMIUM` more are equally
good, and the zone with the fewest machines wins. Nothing is bought above the maximum price of pool
or job, beyond the budget, or where labels forbid it. ``on_demand_minimum`` places take only
on-demand machines. The fallback buys the minimum on demand once all of the job's spot markets have
refused for long enough.

Replacing ahead of time. This concerns machines that the cloud recommends leaving, and machines that
the fallback bought while spot is for sale again. They keep running until the desired number of
other machines is working, and then are surplus. If no replacement is available, they stay.

Stability. A decision stands while nothing else changes:

* No machine is moved or replaced because another one became cheaper. Prices only decide what is
  bought next.
* A machine above its maximum price is given up only after ``dear_seconds``. Prices that oscillate
  faster move nothing, and slower ones move a machine at most once in that time.
* A worker is moved to another job only from a job above its own minimum, and only if that job
  can't take it back: its minimum is filled, and its priority is lower or its share is larger.
* Surplus workers (a job desires fewer than it has) that no other job can use are stopped after
  ``surplus_seconds``. The cheapest machines, and among equals the oldest, are kept longest.
* A machine without a worker is kept for ``idle_seconds``, so that a following job finds it warm. It
  is ended earlier if the cloud recommends leaving it, or if the job that pays for it has a budget
  and isn't running.
* A machine that has not joined is given up after its pool's ``boot_seconds``, or once it reports a
  boot error, and its zone is left alone for a while. A machine that had joined is given up after
  ``lost_seconds``. Until then it counts, so a short disconnection neither kills nor doubles it.
* After a restart of the controller, which also ends with Ray's head, these times start again.
* A market that refused is left alone until ``blocked_until``; see :mod:`vcasgd.backoff`. Its other
  zones and the other pools are still used.

Every action may be carried out twice. A launch's token contains the market's number of launches, so
a launch whose outcome was not recorded is repeated under the same token, and the provider starts
nothing twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from vcasgd.schemas.costs import Offer


@dataclass(frozen=True)
class Launch:
    """Request up to ``count`` machines in a market."""

    pool: str
    count: int
    token: str
    zone: str
    machine_types: tuple[str, ...]
    spot: bool
    jobs: tuple[str, ...] = field(default=(), compare=False)
    """Jobs that pay for the machines until a worker runs on them, one per machine; not part of the
    request to the cloud."""

    def matching(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return those of the pool's offers that can answer it."""
        types = self.machine_types
        return [one for one in offers if one.zone == self.zone and one.machine_type in types]


@dataclass(frozen=True)
class StartWorker:
    """Start a worker for a job on a machine."""

    machine_id: str
    job: str
    learner: int = 1
    """Number of the learner. The plan starts the first; see
    :mod:`vcasgd.controller.fleet.learners` for the others."""


@dataclass(frozen=True)
class StopWorker:
    """Ask the worker to push its progress and leave.

    Its machine stays and is already reassigned, so a worker that doesn't leave in time is killed.
    """

    name: str
    reason: str
    successor: str | None = None
    """Job for which the machine is taken from a job that could still use it."""


@dataclass(frozen=True)
class Terminate:
    """End a machine."""

    machine_id: str
    reason: str


@dataclass(frozen=True)
class Blame:
    """Back off from a market whose machine never joined.

    ``reason`` continues a sentence that starts with the machine's id.
    """

    machine_id: str
    pool: str
    zone: str
    spot: bool
    reason: str


def launch_token(ledger: str, market: str, launches: int) -> str:
    """Return a launch's token, equal for equal arguments; a UUID, which every cloud accepts."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"vcasgd/{ledger}/{market}/{launches}"))


def market_name(pool: str, zone: str, spot: bool) -> str:
    """Return the name under which a market's launches are counted."""
    return f"{pool}/{zone}/{'spot' if spot else 'on-demand'}"
